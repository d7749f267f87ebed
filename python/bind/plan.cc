// plan.cc: compile: two sides in, a plan out.  Stage: python.  Values.

#include "kvloom/plan/compile.h"
#include "kvloom/plan/explain.h"
#include "kvloom/plan/text.h"
#include "kvloom/plan/wire.h"
#include "kvloom/session/session.h"
#include "python/bind/bind.h"
#include "python/bind/values.h"

namespace kvloom::python {
namespace {

using SharedPlan = std::shared_ptr<Plan>;

SharedPlan share(Plan plan) { return std::make_shared<Plan>(std::move(plan)); }

const std::string& group_name(const HeldPath& held) {
  return held.plan->groups()[static_cast<std::size_t>(held.path.group)].target->name;
}

std::int32_t group_of(const Plan& plan, const std::string& name) {
  std::string known;
  for (std::size_t i = 0; i < plan.groups().size(); ++i) {
    if (plan.groups()[i].target->name == name) return static_cast<std::int32_t>(i);
    known += (known.empty() ? "" : ", ") + plan.groups()[i].target->name;
  }
  refuse(Code::invalid_argument, "no cache group {} in this plan: it has {}", name, known);
}

std::string repr(const HeldPath& held) {
  return fmt::format("<Path {} {} > {}: layers {}, heads {}, {} B a token and layer>", group_name(held), held.path.source.value,
                     held.path.target.value, to_string(held.path.layers), to_string(held.path.heads), held.path.row_bytes);
}

void bind_path(nb::module_& m) {
  nb::class_<HeldPath>(m, "Path",
                       "What one source rank sends to one target rank of one cache group: a product of layers, heads and tokens.")
      .def_prop_ro(
          "source", [](const HeldPath& held) { return held.path.source.value; }, "The prefill rank.")
      .def_prop_ro(
          "target", [](const HeldPath& held) { return held.path.target.value; }, "The decode rank.")
      .def_prop_ro("group", group_name, "The cache group's name.")
      .def_prop_ro(
          "layers", [](const HeldPath& held) { return numbers(held.plan->layer_ids(held.path)); }, "Global layer ids.")
      .def_prop_ro(
          "heads", [](const HeldPath& held) { return held.path.heads; }, "Global heads: an interval.")
      .def_prop_ro(
          "tokens", [](const HeldPath& held) { return std::vector(held.path.tokens.begin(), held.path.tokens.end()); },
          "Positions in the request: disjoint families.")
      .def_prop_ro(
          "row_bytes", [](const HeldPath& held) { return held.path.row_bytes; },
          "Bytes of one token and layer: planes x heads of this path.")
      .def(
          "bytes",
          [](const HeldPath& held, const RangeWords& range) {
            return held.plan->bytes(held.path, to_bounded_range(range)).value;
          },
          "range"_a,
          "Bytes that it moves for the tokens `range` = (prefix, total), all its layers. An upper bound where a side's rule is "
          "`value`. Raises InvalidArgument: no total.")
      .def("__repr__", repr);
}

SharedPlan compile_plan(const std::shared_ptr<Side>& source, const std::shared_ptr<Side>& target,
                        std::optional<std::int64_t> total) {
  return share(take(compile(source, target, total.value_or(kUnbounded))));
}

std::string explain_plan(const Plan& plan, const RangeWords& range, std::optional<std::int32_t> source,
                         std::optional<std::int32_t> target) {
  if (source.has_value() != target.has_value())
    refuse(Code::invalid_argument, "explain: wanted both a source and a target rank, or none of them for the whole plan");
  if (!source) return explain(plan, to_range(range));
  return explain(plan, checked(plan.source(), *source), checked(plan.target(), *target), to_range(range));
}

void bind_functions(nb::module_& m) {
  m.def("compile", compile_plan, "source"_a, "target"_a, "total"_a = nb::none(), WithoutGil(),
        "The plan between two sides: which rank sends what to which; in microseconds, whatever the length, and proven to cover "
        "each wanted byte "
        "exactly once.\n\n`total`: the request's tokens, needed where a side cuts its length (zigzag, blocked); None: a plan for "
        "any length.\n"
        "Raises Unsupported: what the source has not as the target wants it, and what can be done. Source: strided sets (FALLS, "
        "Ramaswamy & "
        "Banerjee 1995) met in closed form.");
  m.def(
      "granted_sources",
      [](const Plan& plan, std::int32_t target) { return numbers(granted_sources(plan, checked(plan.target(), target))); },
      "plan"_a, "target"_a,
      "Prefill ranks that this decode rank grants: those with a path to it, and its share of those that have none.");
  m.def(
      "granting_targets",
      [](const Plan& plan, std::int32_t source) { return numbers(granting_targets(plan, checked(plan.source(), source))); },
      "plan"_a, "source"_a, "Decode ranks that will grant this prefill rank.");
}

}  // namespace

void bind_plan(nb::module_& m) {
  bind_path(m);
  nb::class_<Plan> plan_class(
      m, "Plan",
      "Which rank sends what to which rank: made by compile(). Address-free, and length-free unless a rule cuts the length.");
  plan_class
      .def_static(
          "parse", [](const std::string& text) { return share(take(parse_plan(text))); }, "text"_a, WithoutGil(),
          "Reads what str(plan) prints, and nothing else. Raises ParseError with the line.")
      .def_static(
          "decode",
          [](nb::bytes data) {
            return share(take(decode({static_cast<const std::uint8_t*>(data.data()), data.size()})));
          },
          "data"_a, "Reads what encode() gives; other bytes are refused (ParseError, Unsupported, Exhausted).")
      .def(
          "encode",
          [](const Plan& plan) {
            const auto bytes = encode(plan);
            return nb::bytes(bytes.data(), bytes.size());
          },
          "The plan as bytes (FlatBuffers): its two sides, its total and its digest.")
      .def_prop_ro(
          "source", [](const Plan& plan) { return std::make_shared<Side>(plan.source()); }, "The prefill side.")
      .def_prop_ro(
          "target", [](const Plan& plan) { return std::make_shared<Side>(plan.target()); }, "The decode side.")
      .def_prop_ro(
          "total", [](const Plan& plan) { return bounded(plan.total()); }, "The request's tokens; None: good for any length.")
      .def_prop_ro(
          "groups",
          [](const Plan& plan) {
            std::vector<std::string> names;
            for (const GroupPlan& group : plan.groups()) names.push_back(group.target->name);
            return names;
          },
          "Names of its cache groups.")
      .def_prop_ro(
          "digest", [](const Plan& plan) { return digest(plan); },
          "128 bits of its text, 32 hex digits: what both sides of a transfer compare.")
      .def(
          "path",
          [](const SharedPlan& plan, const std::string& group, std::int32_t source,
             std::int32_t target) -> std::optional<HeldPath> {
            auto path = plan->path(group_of(*plan, group), checked(plan->source(), source), checked(plan->target(), target));
            if (!path) return std::nullopt;
            return HeldPath{plan, *path};
          },
          "group"_a, "source"_a, "target"_a,
          "None where the two ranks have nothing in common, or another replica sends it. Raises InvalidArgument, OutOfRange.")
      .def(
          "paths",
          [](const SharedPlan& plan) {
            std::vector<HeldPath> out;
            for (const Path& path : plan->paths()) out.push_back({plan, path});
            return out;
          },
          "All paths, by source, then target, then group.")
      .def("explain", explain_plan, "range"_a = nb::none(), "source"_a = nb::none(), "target"_a = nb::none(), WithoutGil(),
           "Why it is so, in sentences: of the whole plan, or of one pair of ranks. `range` = (prefix, total): with bytes.")
      .def(
          "__str__", [](const Plan& plan) { return to_string(plan); }, WithoutGil())
      .def("__repr__", [](const Plan& plan) {
        return fmt::format("<Plan {} > {}: {} > {} ranks, digest {}>", to_string(plan.source().sharding()),
                           to_string(plan.target().sharding()), plan.source().ranks(), plan.target().ranks(), digest(plan));
      });
  add_documents(plan_class);
  bind_functions(m);
}

}  // namespace kvloom::python
