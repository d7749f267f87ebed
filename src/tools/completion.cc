// completion.cc: `kvloom completion bash|zsh|fish`: a script for the shell.  Stage: tools.
// Made from the same descriptions as the help, so it is never stale.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

#include "kvloom/tools/verb.h"

namespace kvloom {
namespace {

constexpr const char* kCompletionExamples =
    "Examples:\n"
    "  source <(kvloom completion bash)\n"
    "  kvloom completion zsh > \"${fpath[1]}/_kvloom\"\n"
    "  kvloom completion fish > ~/.config/fish/completions/kvloom.fish";

// Beginnings of sharding words; a list goes on after its comma.
constexpr std::array kWords = {"tp=",
                               "dcp=",
                               "cp=",
                               "pp=",
                               "page=",
                               "layout=nhd",
                               "layout=hnd",
                               "layout=packed-nhd",
                               "layout=packed-hnd",
                               "layout=cpu",
                               "page_stride=",
                               "cp=8:layers",
                               "cp=4:zigzag",
                               "cp=4:blocked",
                               "cp=4:interleave=1",
                               "dcp=4",
                               "dcp=8:stripe=1",
                               "dcp=4:value",
                               "draft:replicated"};
constexpr std::array kDtypes = {"auto", "bf16", "fp8", "fp8-dsa"};

struct Choice {
  std::string names;  // "--model" or "--kv-cache-dtype --kv-dtype"
  std::string summary;
  bool takes_value = false;
  bool takes_file = false;
  bool takes_list = false;  // words joined by commas
  std::vector<std::string> values;
};

struct VerbChoices {
  std::string name, summary;
  std::vector<std::string> words;  // that stand by themselves
  std::vector<Choice> options;
};

std::vector<std::string> values_of(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  if (type == "WORDS") return {kWords.begin(), kWords.end()};
  if (type == "DTYPE") return {kDtypes.begin(), kDtypes.end()};
  if (type == "TRANSPORT") return {"shm", "cuda"};
  if (type == "TABLES") return {"identity", "random:1"};
  return {};
}

Choice choice_of(const CLI::Option& option) {
  Choice choice;
  for (const std::string& name : option.get_lnames()) choice.names += (choice.names.empty() ? "--" : " --") + name;
  for (const std::string& name : option.get_snames()) choice.names += (choice.names.empty() ? "-" : " -") + name;
  choice.summary = option.get_description();
  choice.takes_value = option.get_items_expected_max() > 0;
  choice.takes_file = option.get_type_name() == "FILE" || option.get_type_name() == "TABLES";
  choice.takes_list = option.get_type_name() == "WORDS";
  choice.values = values_of(option);
  return choice;
}

std::vector<VerbChoices> choices_of(const CLI::App& app) {
  std::vector<VerbChoices> out;
  for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; })) {
    VerbChoices one{verb->get_name(), verb->get_description(), {}, {}};
    for (const CLI::Option* option : verb->get_options()) {
      if (option->get_positional()) continue;
      one.options.push_back(choice_of(*option));
    }
    if (one.name == "completion") one.words = {"bash", "zsh", "fish"};
    out.push_back(std::move(one));
  }
  return out;
}

template <class List>
std::string joined(const List& words, std::string_view between = " ") {
  std::string out;
  for (const auto& word : words) out += (out.empty() ? "" : std::string(between)) + std::string(word);
  return out;
}

std::string options_of(const VerbChoices& verb) {
  std::vector<std::string> names;
  names.reserve(verb.options.size());
  for (const Choice& choice : verb.options) names.push_back(choice.names);
  return joined(names);
}

std::string verb_names(const std::vector<VerbChoices>& verbs) {
  std::vector<std::string> names;
  names.reserve(verbs.size());
  for (const VerbChoices& verb : verbs) names.push_back(verb.name);
  return joined(names);
}

// Options of one kind are completed alike in all verbs.
std::string names_where(const std::vector<VerbChoices>& verbs, bool (*wanted)(const Choice&)) {
  std::vector<std::string> names;
  for (const VerbChoices& verb : verbs)
    for (const Choice& choice : verb.options) {
      std::string pattern = choice.names;
      std::replace(pattern.begin(), pattern.end(), ' ', '|');
      if (wanted(choice) && std::find(names.begin(), names.end(), pattern) == names.end()) names.push_back(pattern);
    }
  return joined(names, "|");
}

// ---- bash ----

std::string bash(const std::vector<VerbChoices>& verbs) {
  std::string verb_cases;
  for (const VerbChoices& verb : verbs)
    verb_cases += fmt::format("    {}) choices=\"{}\" ;;\n", verb.name, joined(std::array{joined(verb.words), options_of(verb)}));
  return fmt::format(
      R"(# bash completion of kvloom: source <(kvloom completion bash)
_kvloom() {{
  local word="${{COMP_LINE:0:COMP_POINT}}" previous verb="" choices=""
  word="${{word##* }}"
  previous="${{COMP_LINE:0:COMP_POINT-${{#word}}}}"
  previous="${{previous%"${{previous##*[! ]}}"}}"
  previous="${{previous##* }}"
  [[ "$word" == -* && "$previous" != *kvloom ]] && previous="" # an option, not the value of the one before
  local -a words
  read -ra words <<< "$COMP_LINE"
  [[ ${{#words[@]}} -gt 1 ]] && verb="${{words[1]}}"
  case "$previous" in
    {}) # sharding words: the last of a list
      local before=""
      [[ "$word" == *,* ]] && before="${{word%,*}},"
      mapfile -t COMPREPLY < <(compgen -P "$before" -W "{}" -- "${{word##*,}}")
      compopt -o nospace
      _kvloom_cut "$word"
      return ;;
    {}) choices="{}" ;;
    {}) mapfile -t COMPREPLY < <(compgen -f -- "$word"); compopt -o filenames; return ;;
    kvloom|*/kvloom) choices="{} --help --version" ;;
    {}) return ;;
    *) case "$verb" in
{}    esac ;;
  esac
  mapfile -t COMPREPLY < <(compgen -W "$choices" -- "$word")
}}
# bash takes = and : for the ends of words: what stands before the last of them is there already.
_kvloom_cut() {{
  local ends="${{1%"${{1##*[=:]}}"}}" i
  for i in "${{!COMPREPLY[@]}}"; do COMPREPLY[i]="${{COMPREPLY[i]#"$ends"}}"; done
}}
complete -F _kvloom kvloom
)",
      names_where(verbs, [](const Choice& choice) { return choice.takes_list; }), joined(kWords),
      names_where(verbs, [](const Choice& choice) { return !choice.values.empty() && !choice.takes_list && !choice.takes_file; }),
      joined(kDtypes), names_where(verbs, [](const Choice& choice) { return choice.takes_file; }), verb_names(verbs),
      names_where(verbs, [](const Choice& choice) { return choice.takes_value && choice.values.empty() && !choice.takes_file; }),
      verb_cases);
}

// ---- zsh ----

std::string quoted(const std::string& text, std::string_view special) {
  std::string out;
  for (const char c : text) {
    if (c == '\'') {
      out += "'\\''";
      continue;
    }
    if (special.find(c) != std::string_view::npos) out += '\\';
    out += c;
  }
  return out;
}

std::string zsh_option(const Choice& choice) {
  std::string action;
  if (choice.takes_list)
    action = ":sharding words:_kvloom_words";
  else if (choice.takes_file)
    action = ":file:_files";
  else if (!choice.values.empty())
    action = fmt::format(":value:({})", joined(choice.values));
  else if (choice.takes_value)
    action = ":value: ";
  std::string out, names = choice.names;
  for (std::size_t at = 0; at != std::string::npos;) {
    const std::size_t end = names.find(' ', at);
    out += fmt::format("        '{}[{}]{}' \\\n", names.substr(at, end == std::string::npos ? end : end - at),
                       quoted(choice.summary, "[]:"), action);
    at = end == std::string::npos ? end : end + 1;
  }
  return out;
}

std::string zsh(const std::vector<VerbChoices>& verbs) {
  std::string list, cases;
  for (const VerbChoices& verb : verbs) {
    list += fmt::format("    '{}:{}'\n", verb.name, quoted(verb.summary, ":"));
    cases += fmt::format("    {})\n      _arguments \\\n", verb.name);
    for (const Choice& choice : verb.options) cases += zsh_option(choice);
    cases +=
        verb.words.empty() ? "        && return ;;\n" : fmt::format("        '1:shell:({})' && return ;;\n", joined(verb.words));
  }
  return fmt::format(
      R"(#compdef kvloom
# zsh completion of kvloom: kvloom completion zsh > "${{fpath[1]}}/_kvloom"
_kvloom_words() {{ compset -P '*,'; compadd -S '' -- {} }}
_kvloom() {{
  local -a verbs
  verbs=(
{}  )
  if (( CURRENT == 2 )); then
    _describe verb verbs
    return
  fi
  local verb=$words[2]
  shift words
  (( CURRENT-- ))
  case $verb in
{}  esac
}}
if [[ $funcstack[1] == _kvloom ]]; then _kvloom "$@"; else compdef _kvloom kvloom; fi
)",
      joined(kWords), list, cases);
}

// ---- fish ----

std::string fish_option(const VerbChoices& verb, const Choice& choice) {
  std::string names;
  for (std::size_t at = 0; at != std::string::npos;) {
    const std::size_t end = choice.names.find(' ', at);
    const std::string name = choice.names.substr(at, end == std::string::npos ? end : end - at);
    names += name.rfind("--", 0) == 0 ? " -l " + name.substr(2) : " -s " + name.substr(1);
    at = end == std::string::npos ? end : end + 1;
  }
  std::string value;
  if (choice.takes_list)
    value = " -x -a '(__kvloom_words)'";
  else if (choice.takes_file)
    value = " -r -F";
  else if (!choice.values.empty())
    value = fmt::format(" -x -a '{}'", joined(choice.values));
  else if (choice.takes_value)
    value = " -x";
  return fmt::format("complete -c kvloom -n '__fish_seen_subcommand_from {}'{}{} -d '{}'\n", verb.name, names, value,
                     quoted(choice.summary, ""));
}

std::string fish(const std::vector<VerbChoices>& verbs) {
  std::string out = fmt::format(
      R"(# fish completion of kvloom: kvloom completion fish > ~/.config/fish/completions/kvloom.fish
function __kvloom_words
  set -l before (string match -r '.*,' -- (commandline -ct))
  for word in {}
    echo "$before$word" # quoted: without a comma there is no `before`
  end
end
complete -c kvloom -f
complete -c kvloom -n __fish_use_subcommand -l help -d 'Print help and exit'
complete -c kvloom -n __fish_use_subcommand -l version -d 'Print the version and exit'
)",
      joined(kWords));
  for (const VerbChoices& verb : verbs) {
    out += fmt::format("complete -c kvloom -n __fish_use_subcommand -a {} -d '{}'\n", verb.name, quoted(verb.summary, ""));
    if (!verb.words.empty())
      out += fmt::format("complete -c kvloom -n '__fish_seen_subcommand_from {}' -a '{}'\n", verb.name, joined(verb.words));
    for (const Choice& choice : verb.options) out += fish_option(verb, choice);
  }
  return out;
}

}  // namespace

void add_completion(CLI::App& app, Context& context) {
  auto shell = std::make_shared<std::string>();  // shared by the option and the body
  CLI::App* verb =
      add_verb(app, context, "completion", "Print a completion script for bash, zsh or fish", kCompletionExamples,
               [&app, &context, shell]() -> Expected<ExitCode> {
                 const std::vector<VerbChoices> verbs = choices_of(app);
                 fmt::print(context.out, "{}", *shell == "bash" ? bash(verbs) : *shell == "zsh" ? zsh(verbs) : fish(verbs));
                 return kFine;
               });
  verb->add_option("shell", *shell, "bash, zsh or fish")->required()->type_name("SHELL")->check([](const std::string& text) {
    return text == "bash" || text == "zsh" || text == "fish"
               ? std::string()
               : fmt::format("'{}' is no shell that we know: bash, zsh or fish", text);
  });
}

}  // namespace kvloom
