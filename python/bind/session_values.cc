// session_values.cc: what sessions are told and tell: keys, tables, caches, events.  Stage: python.  Values.
#include <nanobind/operators.h>

#include <algorithm>
#include <map>

#include "python/bind/sessions.h"
#include "python/bind/values.h"

namespace kvloom::python {
namespace {

// A stretch of a region, as Python says where a tensor lies.
struct PartWords {
  std::shared_ptr<Lent> region;
  std::int64_t offset = 0, length = 0;
};
struct TensorWords {
  std::string group;
  std::int32_t layer = 0;
  std::vector<PartWords> parts;
};

PartWords part(std::shared_ptr<Lent> region, std::int64_t offset, std::optional<std::int64_t> length) {
  const std::int64_t rest = region->region.length().value - offset;
  return {std::move(region), offset, length.value_or(rest)};
}

HeldCache make_cache(const std::shared_ptr<Side>& side, std::int32_t rank, const std::vector<TensorWords>& tensors) {
  HeldCache out;
  std::map<const Lent*, std::int32_t> known;
  std::vector<const Region*> regions;
  std::vector<PlacedTensor> placed;
  for (const TensorWords& tensor : tensors) {
    PlacedTensor& to = placed.emplace_back(PlacedTensor{group_index(*side, tensor.group), LayerId(tensor.layer), {}});
    std::int64_t begin = 0;
    for (const PartWords& from : tensor.parts) {
      if (out.carrier && out.carrier != from.region->carrier)
        refuse(Code::invalid_argument, "layer {} of {} lies in a region of another transport than the tensors before it",
               tensor.layer, tensor.group);
      out.carrier = from.region->carrier;
      const auto [at, fresh] = known.try_emplace(from.region.get(), static_cast<std::int32_t>(regions.size()));
      if (fresh) {
        regions.push_back(&from.region->region);
        out.regions.push_back(from.region);
      }
      to.parts.push_back({Bytes(begin), Bytes(from.length), at->second, Bytes(from.offset)});
      begin += from.length;
    }
  }
  // A side of its own: a session's thread may be the last to let go of it, and must not take the GIL for that.
  out.cache = take(LocalCache::make(std::make_shared<const Side>(*side), checked(*side, rank), regions, std::move(placed)));
  return out;
}

nb::object why_of(const Error& why, Outcome outcome) { return outcome == Outcome::landed ? nb::none() : exception_of(why); }

void bind_words(nb::module_& m) {
  nb::class_<TransferKey>(m, "TransferKey",
                          "One attempt at one transfer: a name that its caller chose, and an epoch for each attempt. Hashable.")
      .def(nb::new_([](std::string name, std::uint64_t epoch) {
             return TransferKey{std::move(name), Epoch(epoch)};
           }),
           "name"_a, "epoch"_a = 1, "`name`: 1 to 256 bytes. A key is used once on each rank: another attempt has another epoch.")
      .def_ro("name", &TransferKey::name, "Chosen by the caller.")
      .def_prop_ro(
          "epoch", [](const TransferKey& key) { return key.epoch.value; }, "Which attempt.")
      .def(
          "__eq__",
          [](const TransferKey& key, const nb::object& other) {
            return nb::isinstance<TransferKey>(other) && key == nb::cast<const TransferKey&>(other);
          },
          "other"_a)
      .def(
          "__hash__",
          [](const TransferKey& key) { return std::hash<std::string>()(key.name) ^ std::hash<std::uint64_t>()(key.epoch.value); })
      .def("__str__", [](const TransferKey& key) { return to_string(key); })
      .def("__repr__",
           [](const TransferKey& key) {
             return fmt::format("TransferKey('{}', {})", printable(key.name, "'\\"), key.epoch.value);
           })
      .def(
          "__reduce__",
          [](const TransferKey& key) {
            return nb::make_tuple(nb::type<TransferKey>(), nb::make_tuple(key.name, key.epoch.value));
          },
          nb::sig("def __reduce__(self) -> tuple[type[TransferKey], tuple[str, int]]"));
  nb::class_<CacheTable>(m, "CacheTable", "The page table of one cache group of a request, on one rank.")
      .def(
          "__init__",
          [](CacheTable* self, nb::handle pages, std::int64_t pool_pages) {
            new (self) CacheTable{to_pages(pages), pool_pages};
          },
          "pages"_a, "pool_pages"_a, nb::sig("def __init__(self, pages: kvloom.typing.Pages, pool_pages: int) -> None"),
          "`pages`: ids [columns] of the rank's own token set; -1: no page. `pool_pages`: ids are below it. Checked where it is "
          "used.")
      .def("__len__", [](const CacheTable& table) { return table.pages.size(); })
      .def_prop_ro(
          "pages", [](const CacheTable& table) { return numbers(table.pages); }, "Ids [columns].")
      .def_ro("pool_pages", &CacheTable::pool_pages, "Ids are below it.");
  nb::class_<PartWords>(m, "TensorPart", "A stretch of a region.")
      .def(nb::new_(&part), "region"_a, "offset"_a = 0, "length"_a = nb::none(),
           "`length` bytes (None: to the region's end) from byte `offset`.")
      .def_ro("region", &PartWords::region, "Where it lies.")
      .def_ro("offset", &PartWords::offset, "From the region's start, bytes.")
      .def_ro("length", &PartWords::length, "Bytes.");
  nb::class_<TensorWords>(m, "PlacedTensor", "Where a rank's tensor of (group, layer) lies.")
      .def(nb::new_([](std::string group, std::int32_t layer, std::vector<PartWords> parts) {
             return TensorWords{std::move(group), layer, std::move(parts)};
           }),
           "group"_a, "layer"_a, "parts"_a, "`layer`: its global id. `parts`: the tensor's bytes, one after another; mostly one.")
      .def_ro("group", &TensorWords::group, "The cache group's name.")
      .def_ro("layer", &TensorWords::layer, "Global id.")
      .def_ro("parts", &TensorWords::parts, "The tensor's bytes, one after another.");
  nb::class_<HeldCache>(m, "LocalCache",
                        "The memory of one rank under one side: what the side says that it holds, in regions of its transport.")
      .def(nb::new_(&make_cache), "side"_a, "rank"_a, "tensors"_a,
           "`tensors`: PlacedTensor of what `rank` holds (Side.held); those left out can't be moved.\n\nRaises InvalidArgument: "
           "a tensor that the "
           "rank does not hold, or twice, or regions of two transports; OutOfRange: a part outside of its region.")
      .def_prop_ro(
          "side", [](const HeldCache& held) { return std::const_pointer_cast<Side>(held.cache.side); }, "Its side.")
      .def_prop_ro(
          "rank", [](const HeldCache& held) { return held.cache.rank.value; }, "Its rank.");
}

template <class Layer>
void bind_layer_event(nb::module_& m, const char* name, const char* doc) {
  nb::class_<Layer>(m, name, doc)
      .def_ro("key", &Layer::key, "The transfer.")
      .def_prop_ro(
          "layer", [](const Layer& event) { return event.layer.value; }, "Global layer id.")
      .def("__repr__",
           [name](const Layer& event) { return fmt::format("<{} {} layer {}>", name, to_string(event.key), event.layer.value); });
}
template <class Released>
void bind_released_event(nb::module_& m, const char* name, const char* doc) {
  nb::class_<Released>(m, name, doc)
      .def_ro("key", &Released::key, "The transfer.")
      .def("__repr__", [name](const Released& event) { return fmt::format("<{} {}>", name, to_string(event.key)); });
}
template <class Ended>
nb::class_<Ended> bind_ended_event(nb::module_& m, const char* name, const char* doc) {
  return nb::class_<Ended>(m, name, doc)
      .def_ro("key", &Ended::key, "The transfer.")
      .def_ro("outcome", &Ended::outcome, "Landed, failed or cancelled.")
      .def_prop_ro(
          "why", [](const Ended& event) { return why_of(event.why, event.outcome); },
          nb::sig("def why(self) -> kvloom.errors.Error | None"),
          "Where it did not land: an exception that names rank and cause, not raised. None: it landed.")
      .def_prop_ro(
          "at", [](const Ended& event) { return to_seconds(event.at); }, "When, seconds of time.monotonic().")
      .def("__repr__", [name](const Ended& event) {
        return fmt::format("<{} {} {}{}>", name, to_string(event.key), to_string(event.outcome),
                           event.outcome == Outcome::landed ? "" : ": " + to_string(event.why));
      });
}

void bind_events(nb::module_& m) {
  nb::enum_<Outcome>(m, "Outcome", "How a transfer ended.")
      .value("landed", Outcome::landed, "every wanted byte is there")
      .value("failed", Outcome::failed, "it is not, and why says so")
      .value("cancelled", Outcome::cancelled, "either side ended it");
  bind_layer_event<LayerReleased>(m, "LayerReleased",
                                  "A prefill rank: nobody of ours will read this layer's pages of the transfer any more.");
  bind_ended_event<SourceEnded>(m, "SourceEnded", "A prefill rank: the transfer is over, once.")
      .def_prop_ro(
          "exposed_tail", [](const SourceEnded& event) { return to_seconds(event.exposed_tail); },
          "Landed: seconds from the last ready (or the offer) until then: what streaming did not hide.");
  bind_released_event<SourceReleased>(m, "SourceReleased",
                                      "A prefill rank: the pages are the engine's again, once, with or after SourceEnded.");
  bind_layer_event<LayerLanded>(
      m, "LayerLanded", "A decode rank: all bytes of this layer, and of all layers of ours before it, are there and visible.");
  bind_ended_event<TargetEnded>(m, "TargetEnded", "A decode rank: the transfer is over, once.")
      .def_prop_ro(
          "payloads",
          [](const TargetEnded& event) {
            nb::dict out;
            for (const auto& [rank, bytes] : event.payloads) out[nb::int_(rank.value)] = nb::bytes(bytes.data(), bytes.size());
            return out;
          },
          nb::sig("def payloads(self) -> dict[int, builtins.bytes]"), "Landed: from each prefill rank that sent one, by rank.")
      .def_prop_ro(
          "bytes", [](const TargetEnded& event) { return event.bytes.value; }, "Bytes that landed here.");
  bind_released_event<TargetReleased>(
      m, "TargetReleased",
      "A decode rank: the pages are the engine's again, once: with TargetEnded, or later. Until then they are in quarantine.");
}

}  // namespace

Sinks make_sinks(const SinkWords& words, Metrics& metrics, Trace* trace) {
  Sinks sinks{&metrics, trace, {}, LogLevel::error};
  if (words.log.empty()) return sinks;
  for (const LogLevel level : {LogLevel::debug, LogLevel::info, LogLevel::warning, LogLevel::error})
    if (words.log == to_string(level)) {
      sinks.least = level;
      sinks.log = stderr_log(words.name.empty() ? fmt::format("{} {}", words.side, words.rank.value) : words.name, level);
      return sinks;
    }
  refuse(Code::invalid_argument, "log='{}': wanted debug, info, warning or error", words.log);
}

void bind_session_values(nb::module_& m) {
  bind_words(m);
  bind_events(m);
}

}  // namespace kvloom::python
