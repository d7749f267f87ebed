#include "kvloom/tools/html_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kvloom/tools/print.h"

namespace kvloom {

std::int64_t path_weight(const MeasuredPath& path, bool counted) {
  if (counted) return path.moved.bytes;
  std::int64_t sum = 0;
  for (const MeasuredGroup& group : path.groups) sum += group.path.row_bytes * static_cast<std::int64_t>(group.layers.size());
  return sum;
}

namespace {

class PathTable {
 public:
  PathTable(const Plan& plan, const std::vector<MeasuredPath>& paths, bool counted, std::int32_t main, std::size_t lanes)
      : plan_(plan), paths_(paths), counted_(counted), main_(main), lanes_(lanes) {}

  std::string table() {
    add("<details><summary>All paths as a table</summary><table id=\"paths\"><thead><tr><th class=\"n\">source</th><th "
        "class=\"n\">target</th><th>layers</th>"
        "<th>heads</th><th>tokens</th>");
    if (counted_)
      add("<th class=\"n\">pages</th><th class=\"n\">bytes</th><th class=\"n\">runs</th><th class=\"n\">a "
          "run</th></tr></thead><tbody>\n");
    else
      add("<th class=\"n\">bytes a token</th></tr></thead><tbody>\n");
    for (const MeasuredPath& path : paths_) add_row(path);
    add("</tbody></table></details>\n");
    return std::move(out_);
  }

 private:
  template <class... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(out_), format, std::forward<Args>(args)...);
  }

  // Equal words of several groups stand once; different ones each with their group.
  template <class Text>
  std::string of_groups(const MeasuredPath& path, Text text) const {
    std::vector<std::pair<std::string, std::string>> words;  // text, groups
    for (const MeasuredGroup& group : path.groups) {
      const std::string& name = plan_.groups()[static_cast<std::size_t>(group.path.group)].target->name;
      const std::string word = text(group);
      const auto at = std::find_if(words.begin(), words.end(), [&](const auto& w) { return w.first == word; });
      if (at == words.end())
        words.emplace_back(word, name);
      else
        at->second += ", " + name;
    }
    if (words.size() == 1) return words.front().first;
    std::string out;
    for (const auto& [word, names] : words) out += fmt::format("{}{} ({})", out.empty() ? "" : "<br>", word, names);
    return out;
  }

  // For each lane what is lit of it.
  std::string lane_layers(const MeasuredPath& path) const {
    if (lanes_ == 1) return ids_text(path.layers);
    std::vector<std::string> words(lanes_, "none");
    for (const MeasuredGroup& group : path.groups) words[static_cast<std::size_t>(group.path.group)] = ids_text(group.layers);
    return fmt::format("{}", fmt::join(words, ";"));
  }

  static std::string mean(const Moved& moved) {
    return bytes_text(static_cast<double>(moved.bytes) / static_cast<double>(std::max<std::int64_t>(1, moved.runs)));
  }

  // What the panel shows of each group, its total last: name|layers|bytes|runs|bytes a run;...
  std::string group_rows(const MeasuredPath& path) const {
    std::string out;
    for (const MeasuredGroup& group : path.groups) {
      const std::int64_t token = group.path.row_bytes * static_cast<std::int64_t>(group.layers.size());
      out += fmt::format("{}|{}|{}", plan_.groups()[static_cast<std::size_t>(group.path.group)].target->name,
                         ids_text(group.layers), bytes_text(Bytes(counted_ ? group.moved.bytes : token)));
      out += counted_ ? fmt::format("|{}|{};", count_text(group.moved.runs), mean(group.moved)) : ";";
    }
    out += fmt::format("all|{}|{}", ids_text(path.layers), bytes_text(Bytes(path_weight(path, counted_))));
    return counted_ ? out + fmt::format("|{}|{}", count_text(path.moved.runs), mean(path.moved)) : out;
  }

  void add_row(const MeasuredPath& path) {
    const auto plan_of = [&](const MeasuredGroup& group) -> const GroupPlan& {
      return plan_.groups()[static_cast<std::size_t>(group.path.group)];
    };
    std::string main_tokens = "none";
    for (const MeasuredGroup& group : path.groups)
      if (group.path.group == main_)
        main_tokens = to_string(std::vector<StridedSet>(group.path.tokens.begin(), group.path.tokens.end()));
    add("<tr data-path=\"{0}-{1}\" data-layers=\"{2}\" data-tokens=\"{3}\" data-groups=\"{7}\"><td class=\"n\">{0}</td><td "
        "class=\"n\">{1}</td><td>{4}</td><td>{5}</td><td>{6}</td>",
        path.source.value, path.target.value, lane_layers(path), main_tokens,
        of_groups(path, [](const MeasuredGroup& group) { return ids_text(group.layers); }),
        of_groups(path, [&](const MeasuredGroup& group) { return heads_text(*plan_of(group).target, group.path.heads); }),
        of_groups(path,
                  [&](const MeasuredGroup& group) {
                    const std::string set = fmt::format("<code>{}</code>", tokens_text(plan_, group.path, {}));
                    return counted_ ? fmt::format("{} of {}", count_text(group.moved.tokens), set) : set;
                  }),
        path.groups.size() > 1 ? group_rows(path) : "");
    if (!counted_) {
      add("<td class=\"n\">{}</td></tr>\n", bytes_text(Bytes(path_weight(path, counted_))));
      return;
    }
    add("<td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>\n",
        count_text(path.moved.pages),
        of_groups(path, [](const MeasuredGroup& group) { return bytes_text(Bytes(group.moved.bytes)); }),
        of_groups(path, [](const MeasuredGroup& group) { return count_text(group.moved.runs); }),
        of_groups(path, [](const MeasuredGroup& group) { return mean(group.moved); }));
  }

  const Plan& plan_;
  const std::vector<MeasuredPath>& paths_;
  bool counted_;
  std::int32_t main_;
  std::size_t lanes_;
  std::string out_;
};

}  // namespace

std::string path_table(const Plan& plan, const std::vector<MeasuredPath>& paths, bool counted, std::int32_t main,
                       std::size_t lanes) {
  return PathTable(plan, paths, counted, main, lanes).table();
}

}  // namespace kvloom
