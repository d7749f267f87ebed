// session.cc: stream: a prefill rank's and a decode rank's session.  Stage: python.  sessions.h has the law of closing.
// The endpoint's thread never takes the GIL; what it has to say waits in a queue with a descriptor.
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <map>
#include <thread>

#include "python/bind/sessions.h"
#include "python/bind/values.h"

namespace kvloom::python {
namespace {

// What both sessions take, by its word in C++.
struct CommonWords {
  std::string name, log;
  double heartbeat = 0.25, silence = 1, resend = 0.2, grace = 1;
  bool trace = false, events = false;

  void fill(EndpointOptions& options) const {
    options.name = name;
    options.heartbeat = to_duration(heartbeat);
    options.silence = to_duration(silence);
    options.limits.resend = to_duration(resend);
    options.limits.grace = to_duration(grace);
  }
  SinkWords sinks(const char* side, Rank rank) const { return {side, rank, name, log, trace, events}; }
};

using KeyWords = std::optional<std::pair<std::string, std::string>>;  // public, secret
std::optional<CurveKeys> keys_of(const KeyWords& words) {
  return words ? std::optional(CurveKeys{words->first, words->second}) : std::nullopt;
}

// ---- source ----

struct PaceWords {
  std::int64_t in_flight = 256 << 20, in_flight_each = 64 << 20, bytes_per_second = 0, burst = 4 << 20;
  PaceLimits limits() const {
    for (const std::int64_t limit : {in_flight, in_flight_each, bytes_per_second, burst})
      if (limit < 0) refuse(Code::invalid_argument, "a limit of {} B: wanted 0 or more", limit);
    return {Bytes(in_flight), Bytes(in_flight_each), bytes_per_second, Bytes(burst)};
  }
};

class Source : public HeldSession<SourceSession, SourceEvent> {
 public:
  Source(const std::shared_ptr<Carrier>& carrier, const HeldCache& cache, const CommonWords& common, SourceOptions options)
      : HeldSession(carrier, common.sinks("prefill", cache.cache.rank)), side_(cache.cache.side) {
    check(*carrier, cache);
    keep(cache);
    start([&](Transport& transport, Sinks sinks, Heard<SourceEvent> heard) {
      return SourceSession::make(std::move(options), transport, cache.cache, std::move(sinks), std::move(heard));
    });
    address_ = call([](SourceSession& session) { return session.address(); });
  }
  nb::object self() override { return nb::find(this); }
  const std::string& address() const { return address_; }
  std::int32_t group(const std::string& name) const { return group_index(*side_, name); }

 private:
  static void check(const Carrier& carrier, const HeldCache& cache) {
    if (cache.carrier && cache.carrier.get() != &carrier)
      refuse(Code::invalid_argument, "the cache lies in regions of another transport than this session's");
    if (!carrier.abilities().source_must_be_allocated) return;
    for (const auto& lent : cache.regions)
      if (!lent->allocated)
        refuse(Code::invalid_argument,
               "with {} a prefill rank's cache has to lie in memory of transport.allocate(), which peers can map: registered "
               "memory is good for a decode rank only",
               carrier.abilities().name);
  }
  std::shared_ptr<const Side> side_;  // shared with the session
  std::string address_;
};

std::unique_ptr<Source> make_source(std::shared_ptr<Carrier> transport, const HeldCache& cache, const std::string& name,
                                    const std::string& address, const KeyWords& keys, std::vector<std::string> clients,
                                    bool open_to_all, double heartbeat, double silence, double resend, double grace,
                                    std::int64_t in_flight_per_path, std::int64_t in_flight, std::int64_t in_flight_each,
                                    std::int64_t bytes_per_second, std::int64_t burst, double device_nap, bool events, bool trace,
                                    const std::string& log) {
  const CommonWords common{name, log, heartbeat, silence, resend, grace, trace, events};
  SourceOptions options;
  common.fill(options);
  if (in_flight_per_path < 0)
    refuse(Code::invalid_argument, "in_flight_per_path={}: wanted bytes, 0 or more", in_flight_per_path);
  options.limits.in_flight_per_path = Bytes(in_flight_per_path);
  options.control = {address, keys_of(keys), std::move(clients), open_to_all};
  options.pace = PaceWords{in_flight, in_flight_each, bytes_per_second, burst}.limits();
  options.device_nap = to_duration(device_nap);
  return std::make_unique<Source>(std::move(transport), cache, common, std::move(options));
}

// ---- what both offer ----

template <class Held, class Session>
void bind_common(nb::class_<Held>& c, const char* enter) {
  c.def("close", &Held::close,
        "Ends the session: what was asked before is still done, its thread ends, and its regions may go. Open transfers are "
        "given up: peers see "
        "this rank gone. Calls that wait end with Cancelled. Closing twice is fine.")
      .def_prop_ro("closed", &Held::closed, "close() was called.")
      .def(
          "__enter__", [](nb::handle_t<Held> self) { return nb::borrow(self); }, nb::sig(enter))
      .def(
          "__exit__", [](Held& held, const nb::args&) { held.close(); }, nb::sig("def __exit__(self, *args: object) -> None"))
      .def(
          "cancel",
          [](Held& held, const TransferKey& key, std::string why) {
            held.call([&](Session& session) { session.cancel(key, std::move(why)); });
          },
          "key"_a, "why"_a, WithoutGil(), "Ends a transfer; returns at once. Pages stay where they are until it is released.")
      .def(
          "wait_released",
          [](Held& held, const TransferKey& key, double at_most) {
            const auto time = to_duration(at_most);
            held.wait([&](Session& session, const Interrupt& interrupt) { return session.wait_released(key, time, interrupt); });
          },
          "key"_a, "at_most"_a,
          "Waits up to `at_most` seconds until the pages are the engine's again. Raises DeadlineExceeded, InvalidArgument.")
      .def(
          "forget", [](Held& held, const TransferKey& key) { held.call([&](Session& session) { session.forget(key); }); },
          "key"_a, WithoutGil(),
          "What became of the transfer need not be kept any more. Say it for each that is over; without it the last 65,536 are "
          "kept.")
      .def_prop_ro(
          "open", [](Held& held) { return held.call([](Session& session) { return session.open(); }); }, WithoutGil(),
          "Transfers that are not over.")
      .def("poll", &Held::poll, "at_most"_a = 0.0,
           "What happened since the last poll, in order; with nothing there, waits up to `at_most` seconds for something. Each "
           "event comes once, to "
           "one caller. Any thread. Raises InvalidArgument: made without events=True.")
      .def("fileno", &Held::fileno,
           "A descriptor that is readable while poll() has something: for select, selectors or asyncio's add_reader.")
      .def("metrics", &Held::metrics, WithoutGil(), "Prometheus text, version 0.0.4 (docs/operating.md lists the names).")
      .def("trace", &Held::trace, WithoutGil(),
           "What happened when, as a Chrome trace (JSON) for https://ui.perfetto.dev. Raises InvalidArgument: "
           "made without trace=True.");
}

void bind_source(nb::module_& m) {
  nb::class_<Source> c(m, "SourceSession", nb::is_weak_referenceable(),
                       "A prefill rank: listens for grants of any number of decode ranks, and pushes what the engine says is "
                       "ready. Its thread never "
                       "takes the GIL, and costs no CPU while nothing is open.");
  c.def(nb::new_(&make_source), "transport"_a, "cache"_a, nb::kw_only(), "name"_a = "", "address"_a = "tcp://127.0.0.1:*",
        "keys"_a = nb::none(), "clients"_a = std::vector<std::string>(), "open_to_all"_a = false, "heartbeat"_a = 0.25,
        "silence"_a = 1.0, "resend"_a = 0.2, "grace"_a = 1.0, "in_flight_per_path"_a = 64 << 20, "in_flight"_a = 256 << 20,
        "in_flight_each"_a = 64 << 20, "bytes_per_second"_a = 0, "burst"_a = 4 << 20, "device_nap"_a = 5e-6, "events"_a = false,
        "trace"_a = false, "log"_a = "",
        "`address`: where its control socket listens (ZeroMQ; `*`: a free port). `keys`: (public, secret) of make_curve_keys; "
        "then `clients` lists "
        "the public keys that may connect. Without keys it listens on this machine only, unless open_to_all.\n\nTimes in "
        "seconds, limits in bytes: "
        "docs/operating.md. `events`: keep events for poll(). `log`: debug, info, warning or error, lines on stderr.\nRaises "
        "InvalidArgument, "
        "Unavailable: the address is taken.")
      .def_prop_ro("address", &Source::address, "What decode ranks connect to.")
      .def(
          "offer",
          [](Source& source, const TransferKey& key, double time, bool has_payload) {
            const Offer offer{key, to_duration(time), has_payload};
            take(source.call([&](SourceSession& session) { return session.offer(offer); }));
          },
          "key"_a, "time"_a, "has_payload"_a = false, WithoutGil(),
          "What the engine is going to compute: `time` seconds from now it has failed. `has_payload`: payload() will be told, "
          "and rides with "
          "completion. All prefill ranks offer a transfer, those with nothing to send too. Raises InvalidArgument: the key is or "
          "was in use.")
      .def(
          "set_table",
          [](Source& source, const TransferKey& key, const std::string& group, CacheTable table) {
            const std::int32_t index = source.group(group);
            take(source.call([&](SourceSession& session) { return session.set_table(key, index, std::move(table)); }));
          },
          "key"_a, "group"_a, "table"_a, WithoutGil(),
          "The pages of the request's tokens so far; longer tables may follow, and must before the ready of their tokens. Of a "
          "transfer that is "
          "over: nothing. Raises OutOfRange: an id outside of the pool; InvalidArgument: a table that takes back what it has "
          "said.")
      .def(
          "ready",
          [](Source& source, const TransferKey& key, std::int32_t layer, std::int64_t tokens, const std::optional<Work>& after) {
            source.call(
                [&](SourceSession& session) { session.ready(key, LayerId(layer), tokens, after ? after->work : nullptr); });
          },
          "key"_a, "layer"_a, "tokens"_a, "after"_a = nb::none(), WithoutGil(),
          "Tokens below `tokens` are computed for this layer, and in the tables; with `after` (Transport.record): will be, once "
          "that is done. "
          "Returns at once; the push is the session's business. In any interleaving of requests, chunks and layers.")
      .def(
          "ready_all",
          [](Source& source, const std::vector<std::pair<TransferKey, std::int64_t>>& progress, std::int32_t layer,
             const std::optional<Work>& after) {
            source.call([&](SourceSession& session) {
              for (const auto& [key, tokens] : progress)
                session.ready(key, LayerId(layer), tokens, after ? after->work : nullptr);
            });
          },
          "progress"_a, "layer"_a, "after"_a = nb::none(), WithoutGil(),
          "ready() of one layer for all requests of a step: `progress` = [(key, tokens)].")
      .def(
          "payload",
          [](Source& source, const TransferKey& key, const nb::bytes& data) {
            const auto* begin = static_cast<const std::byte*>(data.data());
            std::vector<std::byte> bytes(begin, begin + data.size());
            const nb::gil_scoped_release free;
            take(source.call([&](SourceSession& session) { return session.payload(key, std::move(bytes)); }));
          },
          "key"_a, "data"_a, "Up to 64 KiB that ride with completion (first token, log-probabilities). Raises InvalidArgument.")
      .def(
          "wait",
          [](Source& source, const TransferKey& key, double at_most) {
            const auto time = to_duration(at_most);
            return source.wait(
                [&](SourceSession& session, const Interrupt& interrupt) { return session.wait(key, time, interrupt); });
          },
          "key"_a, "at_most"_a,
          "Waits up to `at_most` seconds until it is over, whatever the outcome. Raises DeadlineExceeded, InvalidArgument.")
      .def(
          "wait_layer_released",
          [](Source& source, const TransferKey& key, std::int32_t layer, double at_most) {
            const auto time = to_duration(at_most);
            source.wait([&](SourceSession& session, const Interrupt& interrupt) {
              return session.wait_layer_released(key, LayerId(layer), time, interrupt);
            });
          },
          "key"_a, "layer"_a, "at_most"_a,
          "Waits until nobody of ours will read this layer's pages any more. Raises DeadlineExceeded, InvalidArgument, or why it "
          "is over without.")
      .def(
          "counts",
          [](Source& source) {
            const auto counts = source.call([](SourceSession& session) { return session.counts(); });
            return std::unordered_map<std::string, std::int64_t>{
                {"posts", counts.posts}, {"runs", counts.runs}, {"delivered", counts.delivered.value}};
          },
          WithoutGil(), "What was posted so far (posts, runs), and of it delivered (bytes).");
  bind_common<Source, SourceSession>(c, "def __enter__(self) -> SourceSession");
}

// ---- target ----

using SourceWords =
    std::vector<std::variant<std::string, std::pair<std::string, std::string>>>;  // address; or address and public key

class Target : public HeldSession<TargetSession, TargetEvent> {
 public:
  Target(std::shared_ptr<Carrier> carrier, Rank rank, const CommonWords& common, TargetOptions options)
      : HeldSession(carrier, common.sinks("decode", rank)), carrier_(std::move(carrier)) {
    start([&](Transport& transport, Sinks sinks, Heard<TargetEvent> heard) {
      return TargetSession::make(std::move(options), transport, std::move(sinks), std::move(heard));
    });
  }

  nb::object self() override { return nb::find(this); }

  // @pre the GIL
  std::uint32_t describe(const HeldCache& cache) {
    if (cache.carrier && cache.carrier != carrier_)
      refuse(Code::invalid_argument, "the cache lies in regions of another transport than this session's");
    const GeometryId geometry = [&] {
      const nb::gil_scoped_release free;
      return take(call([&](TargetSession& session) { return session.describe(cache.cache); }));
    }();
    keep(cache);
    const std::lock_guard lock(mutex_);
    sides_[geometry.value] = cache.cache.side;
    return geometry.value;
  }
  void forget_geometry(std::uint32_t geometry) {
    call([&](TargetSession& session) { session.forget(GeometryId(geometry)); });
    const std::lock_guard lock(mutex_);
    sides_.erase(geometry);
  }
  std::vector<CacheTable> tables_of(std::uint32_t geometry, std::unordered_map<std::string, CacheTable>&& tables) {
    const std::lock_guard lock(mutex_);
    const auto at = sides_.find(geometry);
    if (at == sides_.end()) refuse(Code::invalid_argument, "geometry {} is not described", geometry);
    std::vector<CacheTable> out(at->second->groups().size());
    for (auto& [group, table] : tables) out[static_cast<std::size_t>(group_index(*at->second, group))] = std::move(table);
    return out;
  }

 private:
  std::shared_ptr<Carrier> carrier_;
  std::mutex mutex_;  // guards sides_
  std::map<std::uint32_t, std::shared_ptr<const Side>> sides_;
};

std::unique_ptr<Target> make_target(std::shared_ptr<Carrier> transport, std::int32_t rank, const std::string& name,
                                    const KeyWords& keys, double heartbeat, double silence, double resend, double grace,
                                    std::int64_t copy_bytes, bool events, bool trace, const std::string& log) {
  const CommonWords common{name, log, heartbeat, silence, resend, grace, trace, events};
  TargetOptions options;
  common.fill(options);
  options.keys = keys_of(keys);
  if (copy_bytes < 0) refuse(Code::invalid_argument, "copy_bytes={}: wanted 0 or more", copy_bytes);
  options.copy_bytes = Bytes(copy_bytes);
  return std::make_unique<Target>(std::move(transport), Rank(rank), common, std::move(options));
}

void begin(Target& target, const TransferKey& key, std::uint32_t geometry, const SourceWords& sources, const RangeWords& range,
           std::unordered_map<std::string, CacheTable> tables, double time, const std::optional<Gate>& gate) {
  Want want{key,
            GeometryId(geometry),
            {},
            to_range(range),
            target.tables_of(geometry, std::move(tables)),
            to_duration(time),
            gate ? gate->gate : nullptr};
  for (const auto& source : sources) {
    if (const auto* address = std::get_if<std::string>(&source))
      want.sources.push_back({*address, ""});
    else
      want.sources.push_back({std::get<1>(source).first, std::get<1>(source).second});
  }
  take(target.call([&](TargetSession& session) { return session.begin(std::move(want)); }));
}

void bind_target(nb::module_& m) {
  nb::class_<Target> c(m, "TargetSession", nb::is_weak_referenceable(),
                       "A decode rank: asks any number of prefill ranks for a request's cache, and tells what has landed. Its "
                       "thread never takes the "
                       "GIL, and costs no CPU while nothing is open.");
  c.def(nb::new_(&make_target), "transport"_a, nb::kw_only(), "rank"_a = 0, "name"_a = "", "keys"_a = nb::none(),
        "heartbeat"_a = 0.25, "silence"_a = 1.0, "resend"_a = 0.2, "grace"_a = 1.0, "copy_bytes"_a = 0, "events"_a = false,
        "trace"_a = false, "log"_a = "",
        "`transport`: one that listens. `rank`: for the labels of metrics. `keys`: (public, secret) of make_curve_keys. "
        "`copy_bytes`: landed in one "
        "round of its thread; 0: as the transport likes it.\n\nTimes in seconds: docs/operating.md. `events`, `log`: as "
        "SourceSession.\nRaises "
        "InvalidArgument: a transport that nobody can connect to.")
      .def("describe", &Target::describe, "cache"_a,
           "From now on transfers may land there; gives the geometry's id. A rank may have several, on the same memory: a decode "
           "group changes its "
           "sharding from one request to the next. Raises InvalidArgument.")
      .def("forget_geometry", &Target::forget_geometry, "geometry"_a, WithoutGil(), "No transfer begins there any more.")
      .def("begin", begin, "key"_a, "geometry"_a, "sources"_a, "range"_a, "tables"_a, "time"_a, "gate"_a = nb::none(),
           WithoutGil(),
           "Asks for a request's cache: connects to whom it has to, compiles the plan, grants. All that goes wrong later is told "
           "by TargetEnded.\n\n"
           "`sources`: where each prefill rank listens, [prefill ranks]: its address, or with keys (address, public key). "
           "`range` = (prefix, total): "
           "tokens that are wanted. `tables`: by group, the pages for [0, total); groups that the source has not may be left "
           "out. `time`: seconds "
           "from now on; then it has failed.\nRaises InvalidArgument, OutOfRange.")
      .def(
          "wait",
          [](Target& target, const TransferKey& key, double at_most) {
            const auto time = to_duration(at_most);
            return target.wait(
                [&](TargetSession& session, const Interrupt& interrupt) { return session.wait(key, time, interrupt); });
          },
          "key"_a, "at_most"_a,
          "Waits up to `at_most` seconds until it is over, whatever the outcome. Raises DeadlineExceeded, InvalidArgument.")
      .def(
          "wait_layer",
          [](Target& target, const TransferKey& key, std::int32_t layer, double at_most) {
            const auto time = to_duration(at_most);
            target.wait([&](TargetSession& session, const Interrupt& interrupt) {
              return session.wait_layer(key, LayerId(layer), time, interrupt);
            });
          },
          "key"_a, "layer"_a, "at_most"_a,
          "Waits until all bytes of this layer and of ours below it are there and visible. Raises DeadlineExceeded, "
          "InvalidArgument, or why it is "
          "over without it.")
      .def(
          "covered",
          [](Target& target, const TransferKey& key) {
            return target.call([&](TargetSession& session) { return session.covered(key); }).value;
          },
          "key"_a, WithoutGil(), "Bytes that have landed so far; of a transfer that is not open: 0.");
  bind_common<Target, TargetSession>(c, "def __enter__(self) -> TargetSession");
}

}  // namespace

std::set<OpenSession*>& OpenSession::all() {
  static std::set<OpenSession*> sessions;
  return sessions;
}

void OpenSession::close_all() {
  const auto next = [](auto is_wanted) {
    const auto at = std::find_if(all().begin(), all().end(), is_wanted);
    return at == all().end() ? nb::object() : (*at)->self();
  };
  // Whoever is closed stays alive while the GIL is not ours.
  while (const nb::object open = next([](const OpenSession* session) { return !session->closed(); })) open.attr("close")();
  while (next([](const OpenSession* session) { return session->waited_in(); })) {
    const nb::gil_scoped_release free;
    std::this_thread::yield();
  }
}

void bind_session(nb::module_& m) {
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&OpenSession::close_all));
  bind_source(m);
  bind_target(m);
  m.def(
      "make_curve_keys",
      [] {
        const CurveKeys keys = make_curve_keys();
        return std::pair(keys.public_key, keys.secret_key);
      },
      "A pair of keys (public, secret) for control sockets: Z85 text, 40 characters each. Source: CurveZMQ.");
  m.def(
      "merge_traces", [](const std::vector<std::string>& parts) { return take(merge_traces(parts)); }, "parts"_a, WithoutGil(),
      "One trace of several. Raises ParseError: which part is none.");
}

}  // namespace kvloom::python
