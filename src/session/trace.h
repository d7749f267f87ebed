// trace.h: what happened when, as one picture.  Stage: stream.  A resource; nothing here decides anything.
// The file is Chrome's trace event JSON, which https://ui.perfetto.dev opens: a process is a rank ("prefill rank 3"), a track is
// one of its places where things happen ("layer compute", "to decode rank 1"). Spans of a track that overlap without lying in
// each other, as posts under way do, are drawn on several lines of it: a viewer would lose them on one.
// Laws (trace_test.cc): every event told is in the file or counted as dropped; in a merged file no two processes are one.
// Memory: at most `max_events` of about 150 B (and longer names of transfers); later ones are dropped: the file says so.
// Thread: any.  Time: passed in, of CLOCK_MONOTONIC, so that all processes of a host are on one clock.
// @cost of an event: a lock, a copy of a transfer's key. Nothing is formatted before json().
// Source: "Trace Event Format", Google 2016.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/base/units.h"
#include "kvloom/session/message.h"
#include "kvloom/session/session.h"

namespace kvloom {

// A word of our own, known when compiling: it is kept by its address.
class TraceWord {
 public:
  consteval TraceWord(const char* text) : text_(text) {}
  const char* text() const { return text_; }

 private:
  const char* text_;
};

// What an event was about, as far as that applies.
struct TraceArgs {
  std::optional<TransferKey> transfer;
  std::optional<LayerId> layer;
  std::optional<TokenRange> tokens;
  std::optional<Bytes> bytes;
};

using TrackId = Id<struct TrackTag, std::int32_t>;  // of one Trace

class Trace {
 public:
  static constexpr std::size_t kMaxEvents = std::size_t{1} << 18;  // 40 MB; 80 MB as a file

  // `pid`: what tells the processes of a merged file apart; the operating system's, where it is known.  @pre in [0, 2^31)
  Trace(std::string process, std::int64_t pid, std::size_t max_events = kMaxEvents);

  // The track of this name; the same one each time.  @cost a look-up: keep what it gives
  TrackId track(std::string_view name);

  void span(TrackId track, TraceWord category, TraceWord name, Instant begin, Instant end, TraceArgs args = {});
  void instant(TrackId track, TraceWord category, TraceWord name, Instant at, TraceArgs args = {});
  // From now on the process has `value` of `unit` ("in flight", "bytes").
  void counter(TraceWord name, TraceWord unit, Instant at, std::int64_t value);

  std::size_t events() const;
  std::uint64_t dropped() const;

  // A whole file, of this process alone.
  std::string json() const;

 private:
  friend class TraceFile;  // trace.cc
  enum class Kind : std::uint8_t { span, instant, counter };
  struct Event {
    Kind kind;
    TrackId track;
    const char* category;  // of a counter: its unit
    const char* name;
    Instant begin, end;
    std::int64_t value;
    TraceArgs args;
  };
  void record(Event&& event);

  const std::string process_;
  const std::int64_t pid_;
  const std::size_t max_events_;
  mutable std::mutex mutex_;  // guards what follows
  std::vector<std::string> tracks_;
  std::map<std::string, TrackId, std::less<>> track_ids_;
  std::deque<Event> events_;  // grows without moving what is there
  std::uint64_t dropped_ = 0;
};

// One file of several, each of Trace::json() or of this function. Of two parts' processes with one pid the later one gets
// another. @error parse: which part is not such a file, and why
Expected<std::string> merge_traces(std::span<const std::string> parts);

}  // namespace kvloom
