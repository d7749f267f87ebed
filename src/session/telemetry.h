// telemetry.h: what an endpoint tells about itself: one place from which metrics, trace and log are fed.  Stage: stream.
// Log: info for what begins and ends (connections, transfers), warning for what failed, debug for each layer. Lines name transfer and epoch.
// Thread: its endpoint's.  Every sink may be missing; then it costs a comparison.
#pragma once

#include <map>

#include "kvloom/session/log.h"
#include "kvloom/session/metrics.h"
#include "kvloom/session/sender.h"
#include "kvloom/session/trace.h"

namespace kvloom {

struct Sinks {
  Metrics* metrics = nullptr;  // these outlive the endpoint
  Trace* trace = nullptr;
  LogSink log;
  LogLevel least = LogLevel::info;  // that `log` is told; what is below is not even worded
};

class Telemetry {
 public:
  explicit Telemetry(Sinks sinks) : sinks_(std::move(sinks)) {}

  // ---- transfers ----
  void opened(const TransferKey& key, std::int64_t pages, Instant now);
  void granted();
  void ended(const TransferKey& key, Outcome outcome, const Error& why, Instant now);
  void quarantined(const TransferKey& key);  // it has ended, and its pages may not be used again yet
  void released(const TransferKey& key, Instant now);
  void tail(std::chrono::nanoseconds exposed);

  // ---- a source ----
  void ready(const TransferKey& key, LayerId layer, std::int64_t tokens, Instant now);
  void left_queue(std::chrono::nanoseconds waited);
  void begin_post() { runs_ = 0; }
  void wrote(std::size_t runs) { runs_ += static_cast<std::int64_t>(runs); }
  void posted(const TransferKey& key, const Sender::Post& post, std::chrono::nanoseconds since_ready, Instant now);
  // A post under way, as far as its end is told with it.
  struct Post {
    Rank target;
    std::optional<PostPart> first;  // of its parts
    Bytes bytes;
    Instant posted{};
  };
  void delivered(const TransferKey& key, const Post& post, Instant now, const std::optional<Error>& error);

  // ---- a target ----
  void layer_landed(const TransferKey& key, LayerId layer, Instant now);
  void landed(Bytes bytes);
  void noticed();

  // ---- connections ----
  void sent(bool taken);
  void received();
  void connected(const std::string& peer);
  void lost(const std::string& peer, const Error& why);
  void refused(const std::string& peer, const Error& why);
  void geometry_refused(const std::string& peer, const Error& why);
  void nonsense(const Error& why);

 private:
  struct Open {
    Instant begun{};
    std::int64_t pages = 0;
    Instant ended = kNever;
    bool quarantined = false;
  };
  template <class... Args>
  void log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) const {
    if (sinks_.log && level >= sinks_.least) sinks_.log(level, fmt::format(format, std::forward<Args>(args)...));
  }

  Sinks sinks_;
  std::map<TransferKey, Open> open_;
  std::int64_t runs_ = 0;       // of the post that is being written
  std::uint64_t nonsense_ = 0;  // messages that were none
};

}  // namespace kvloom
