#include "kvloom/session/trace.h"

#include <algorithm>
#include <cassert>
#include <nlohmann/json.hpp>
#include <set>

namespace kvloom {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kPids = std::int64_t{1} << 31;  // what viewers read
constexpr const char* kDropped = "dropped_events";

// Microseconds, as the format wants them: exact to the nanosecond for the first hundred days of a host, then to two.
double micros(Instant time) { return static_cast<double>(time.count()) / 1000.0; }

// Spans of one track, on as few lines as show them all: on a line each lies in what is open there, or begins when that has ended.
class Lines {
 public:
  // @pre spans come in order of `begin`, longer ones first    @return the line, 0-based
  std::size_t put(Instant begin, Instant end) {
    for (std::size_t i = 0;; ++i) {
      if (i == open_.size()) open_.emplace_back();
      std::vector<Instant>& line = open_[i];
      while (!line.empty() && line.back() <= begin) line.pop_back();
      if (!line.empty() && line.back() < end) continue;
      line.push_back(end);
      return i;
    }
  }
  std::size_t count() const { return std::max<std::size_t>(open_.size(), 1); }

 private:
  std::vector<std::vector<Instant>> open_;  // [lines], ends of the spans that lie in each other, the outermost first
};

}  // namespace

// The text of a file, an event a line.
class TraceFile {
 public:
  void add(const Json& event) {
    if (!text_.empty()) text_ += ",\n";
    text_ += event.dump(-1, ' ', false, Json::error_handler_t::replace);  // a transfer's name need not be UTF-8
  }
  void add(const Trace& trace);
  void drop(std::uint64_t events) { dropped_ += events; }
  std::string finish() && {
    const Json about = {{"clock", "CLOCK_MONOTONIC"}, {kDropped, dropped_}};
    return fmt::format("{{\"displayTimeUnit\":\"ns\",\n\"otherData\":{},\n\"traceEvents\":[\n{}\n]}}\n", about.dump(), text_);
  }

 private:
  using Event = Trace::Event;
  using Kind = Trace::Kind;

  void about(std::int64_t pid, const char* what, Json args, std::optional<std::size_t> tid = {}) {
    Json event = {{"ph", "M"}, {"name", what}, {"pid", pid}};
    if (tid) event["tid"] = *tid;
    event["args"] = std::move(args);
    add(event);
  }
  void add_track(const Trace& trace, std::string_view name, std::vector<const Event*> events, std::size_t& next_tid);
  static Json args_of(const TraceArgs& args);
  static Json json_of(const Event& event, std::int64_t pid, std::size_t tid);

  std::string text_;
  std::uint64_t dropped_ = 0;
};

Json TraceFile::args_of(const TraceArgs& args) {
  Json out = Json::object();
  if (args.transfer) out["transfer"] = to_string(*args.transfer);
  if (args.layer) out["layer"] = args.layer->value;
  if (args.tokens) out["tokens"] = fmt::format("[{}, {})", args.tokens->begin, args.tokens->end);
  if (args.bytes) out["bytes"] = args.bytes->value;
  return out;
}

Json TraceFile::json_of(const Event& event, std::int64_t pid, std::size_t tid) {
  Json out = {{"ph", event.kind == Kind::span ? "X" : "i"},
              {"name", event.name},
              {"cat", event.category},
              {"pid", pid},
              {"tid", tid},
              {"ts", micros(event.begin)}};
  if (event.kind == Kind::span) out["dur"] = micros(std::max(event.end - event.begin, Instant(0)));
  if (event.kind == Kind::instant) out["s"] = "t";  // as high as its track
  if (Json args = args_of(event.args); !args.empty()) out["args"] = std::move(args);
  return out;
}

void TraceFile::add_track(const Trace& trace, std::string_view name, std::vector<const Event*> events, std::size_t& next_tid) {
  std::stable_sort(events.begin(), events.end(),
                   [](const Event* a, const Event* b) { return a->begin != b->begin ? a->begin < b->begin : a->end > b->end; });
  Lines lines;
  for (const Event* event : events)
    add(json_of(*event, trace.pid_, next_tid + (event->kind == Kind::span ? lines.put(event->begin, event->end) : 0)));
  for (std::size_t line = 0; line < lines.count(); ++line, ++next_tid) {
    about(trace.pid_, "thread_name", {{"name", line == 0 ? std::string(name) : fmt::format("{} ({})", name, line + 1)}},
          next_tid);
    about(trace.pid_, "thread_sort_index", {{"sort_index", next_tid}}, next_tid);
  }
}

// @pre nobody adds to the trace
void TraceFile::add(const Trace& trace) {
  about(trace.pid_, "process_name", {{"name", trace.process_}});
  if (trace.dropped_ > 0)
    about(trace.pid_, "process_labels", {{"labels", fmt::format("the last {} events were dropped", trace.dropped_)}});
  std::vector<std::vector<const Event*>> events(trace.tracks_.size());
  for (const Event& event : trace.events_) {
    if (event.kind != Kind::counter)
      events[static_cast<std::size_t>(event.track.value)].push_back(&event);
    else
      add({{"ph", "C"},
           {"name", event.name},
           {"pid", trace.pid_},
           {"ts", micros(event.begin)},
           {"args", {{event.category, event.value}}}});
  }
  std::size_t next_tid = 1;
  for (std::size_t t = 0; t < events.size(); ++t) add_track(trace, trace.tracks_[t], std::move(events[t]), next_tid);
  drop(trace.dropped_);
}

// ---- recording ----

Trace::Trace(std::string process, std::int64_t pid, std::size_t max_events)
    : process_(std::move(process)), pid_(pid), max_events_(max_events) {
  assert(pid >= 0 && pid < kPids);
}

TrackId Trace::track(std::string_view name) {
  const std::lock_guard lock(mutex_);
  if (const auto at = track_ids_.find(name); at != track_ids_.end()) return at->second;
  const TrackId id(static_cast<std::int32_t>(tracks_.size()));
  tracks_.emplace_back(name);
  track_ids_.emplace(name, id);
  return id;
}

void Trace::span(TrackId track, TraceWord category, TraceWord name, Instant begin, Instant end, TraceArgs args) {
  record({Kind::span, track, category.text(), name.text(), begin, std::max(begin, end), 0, std::move(args)});
}

void Trace::instant(TrackId track, TraceWord category, TraceWord name, Instant at, TraceArgs args) {
  record({Kind::instant, track, category.text(), name.text(), at, at, 0, std::move(args)});
}

void Trace::counter(TraceWord name, TraceWord unit, Instant at, std::int64_t value) {
  record({Kind::counter, {}, unit.text(), name.text(), at, at, value, {}});
}

void Trace::record(Event&& event) {
  const std::lock_guard lock(mutex_);
  assert(event.kind == Kind::counter || static_cast<std::size_t>(event.track.value) < tracks_.size());
  if (events_.size() < max_events_)
    events_.push_back(std::move(event));
  else
    ++dropped_;
}

std::size_t Trace::events() const {
  const std::lock_guard lock(mutex_);
  return events_.size();
}

std::uint64_t Trace::dropped() const {
  const std::lock_guard lock(mutex_);
  return dropped_;
}

std::string Trace::json() const {
  TraceFile file;
  const std::lock_guard lock(mutex_);  // for the seconds that this takes events wait: it is for the end of a run
  file.add(*this);
  return std::move(file).finish();
}

// ---- merging ----

namespace {

Expected<Json> read_part(std::size_t index, const std::string& text) {
  Json part = Json::parse(text, nullptr, false);
  const auto refuse = [&](std::string why) { return fail(Code::parse, "part {} is not a trace: {}", index, why); };
  if (part.is_discarded()) return refuse("it is not JSON");
  if (!part.is_object() || !part.contains("traceEvents") || !part["traceEvents"].is_array())
    return refuse("no list of traceEvents");
  std::size_t at = 0;
  for (const Json& event : part["traceEvents"]) {
    const bool known = event.is_object() && event.contains("ph") && event["ph"].is_string();
    if (!known || !event.contains("pid") || !event["pid"].is_number_integer())
      return refuse(fmt::format("event {} has no ph or no pid", at));
    if (const auto pid = event["pid"].get<std::int64_t>(); pid < 0 || pid >= kPids)
      return refuse(fmt::format("event {} has pid {}, outside of [0, 2^31)", at, event["pid"].dump()));
    ++at;
  }
  return part;
}

std::uint64_t dropped_of(const Json& part) {
  if (!part.contains("otherData") || !part["otherData"].is_object()) return 0;
  const Json& about = part["otherData"];
  return about.contains(kDropped) && about[kDropped].is_number_unsigned() ? about[kDropped].get<std::uint64_t>() : 0;
}

// Pids of a merged file: those of the parts, as long as no earlier part has them.
class Pids {
 public:
  void begin_part() { part_.clear(); }
  std::int64_t of(std::int64_t pid) {
    const auto [at, fresh] = part_.try_emplace(pid, pid);
    if (fresh && !taken_.insert(pid).second) {
      while (!taken_.insert(next_).second) ++next_;
      at->second = next_;
    }
    return at->second;
  }

 private:
  std::map<std::int64_t, std::int64_t> part_;
  std::set<std::int64_t> taken_;
  std::int64_t next_ = 1;
};

}  // namespace

Expected<std::string> merge_traces(std::span<const std::string> parts) {
  TraceFile file;
  Pids pids;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    auto part = read_part(i, parts[i]);
    if (!part) return tl::unexpected(part.error());
    pids.begin_part();
    for (Json& event : (*part)["traceEvents"]) {
      event["pid"] = pids.of(event["pid"].get<std::int64_t>());
      file.add(event);
    }
    file.drop(dropped_of(*part));
  }
  return std::move(file).finish();
}

}  // namespace kvloom
