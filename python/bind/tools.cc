// tools.cc: the command line as a function, and what its verbs print: documents and the picture.  Stage: python.

#include <memory>

#include "kvloom/tools/documents.h"
#include "kvloom/tools/html.h"
#include "kvloom/tools/measure.h"
#include "python/bind/bind.h"

int kvloom_main(int argc, char** argv);  // main() of src/tools/main.cc, by another name (cmake/kvloom_python.cmake)

namespace kvloom::python {
namespace {

int run_main(std::vector<std::string> words) {
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  return kvloom_main(static_cast<int>(words.size()), argv.data());
}

std::string picture(const Plan& plan, const RangeWords& words, const std::string& tables) {
  if (!words) return plan_html(plan, take(measure(plan, nullptr, {})), std::nullopt);
  const TokenRange range = to_bounded_range(words);
  const RequestTables made = take(make_tables(plan, range.end, tables));
  return plan_html(plan, take(measure(plan, &made, range)), range);
}

// A side's words, for the documents, go by the job of the command line.
Job job_of(std::shared_ptr<const Side> prefill, std::shared_ptr<const Side> decode, const RangeWords& words) {
  const TokenRange range = words && words->first != 0 ? to_bounded_range(words) : to_range(words);
  const auto tokens = words ? words->second : std::nullopt;
  CacheShape shape = prefill->shape();
  return {std::move(shape), std::move(prefill), std::move(decode), tokens, range.begin};
}

template <class Work>
std::string without_gil(Work work) {
  const FreeGil free;
  return work();
}

nb::object from_json(const std::string& text) {
  const InPython here;
  return nb::module_::import_("json").attr("loads")(text);
}

// A frame of its own, since the picture is a whole page with a style and a script.
nb::object framed(const Plan& plan) {
  const std::string page = without_gil([&] { return picture(plan, std::nullopt, "identity"); });
  const InPython here;
  const nb::object escaped = nb::module_::import_("html").attr("escape")(page);
  return nb::str("<iframe style=\"width: 100%; height: 40em; border: 0\" srcdoc=\"") + escaped + nb::str("\"></iframe>");
}

}  // namespace

void add_documents(nb::class_<Plan>& plan) {
  plan.def(
          "to_dict",
          [](const Plan& of, const RangeWords& range, const std::string& tables) {
            return from_json(without_gil([&] {
              return take(plan_document(job_of(std::make_shared<Side>(of.source()), std::make_shared<Side>(of.target()), range),
                                        of, tables));
            }));
          },
          "range"_a = nb::none(), "tables"_a = "identity",
          nb::sig("def to_dict(self, range: tuple[int, int | None] | None = None, tables: str = 'identity') -> dict[str, "
                  "typing.Any]"),
          "The plan as `kvloom plan --json` has it: a nested dict, numbers in bytes. With `range` = (prefix, total) its paths "
          "are counted, by the page "
          "tables that `tables` says (identity, random:SEED, or a file). Raises what bind() raises.")
      .def("html", picture, "range"_a = nb::none(), "tables"_a = "identity", WithoutGil(),
           "The plan as a picture: one page of HTML without any outside resource. With `range` = (prefix, total) its paths are "
           "counted, as by to_dict.")
      .def("_repr_html_", framed, nb::sig("def _repr_html_(self) -> str"), "The picture, for notebooks.");
}

void bind_tools(nb::module_& m) {
  m.def("main", run_main, "words"_a, WithoutGil(),
        "Runs the command line with these words, the program's name first, and gives its exit code: 0 fine, 1 the job failed, 2 "
        "bad usage. It may "
        "fork: for a process of one thread.");
  m.def(
      "describe",
      [](const std::shared_ptr<Side>& prefill, const std::shared_ptr<Side>& decode, const RangeWords& range,
         std::int64_t memory) {
        if (memory < 0) refuse(Code::invalid_argument, "a memory of {} B: wanted 0 or more", memory);
        return from_json(without_gil([&] { return take(describe_document(job_of(prefill, decode, range), memory)); }));
      },
      "prefill"_a, "decode"_a, "range"_a = nb::none(), "memory"_a = 0,
      nb::sig("def describe(prefill: Side, decode: Side, range: tuple[int, int | None] | None = None, memory: int = 0) -> "
              "dict[str, typing.Any]"),
      "What each rank of both sides holds, as `kvloom describe --json` has it: a nested dict, numbers in bytes. `range` = "
      "(prefix, total) where a "
      "rule cuts the request's length. `memory`: of each rank's cache, bytes: adds the capacity in tokens. Raises "
      "InvalidArgument.");
}

}  // namespace kvloom::python
