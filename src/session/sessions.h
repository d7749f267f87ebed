// sessions.h: what an engine holds: a prefill rank's or a decode rank's endpoint on a thread of its own, with calls that any thread may make and
// waits that have a deadline.  Stage: stream.
// A source session says what the forward pass has done; a target session waits for layers. Both keep what became of a transfer until
// `forget`, or until kKept others have ended since.
// Thread: any, but that the maker makes and destroys it, when nobody waits in it any more.  Time: every wait has an end.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>

#include "kvloom/session/endpoint_thread.h"
#include "kvloom/session/source_endpoint.h"
#include "kvloom/session/target_endpoint.h"

namespace kvloom {

inline constexpr std::size_t kKept = 65536;  // transfers that are over and were not forgotten

// Asked by a thread that waits, each kLook: true ends its wait with `cancelled` (a signal came, the session is being closed). May be none.
using Interrupt = std::function<bool()>;
inline constexpr std::chrono::milliseconds kLook{50};

// Told all that happens, in order, on the session's thread and before whoever waits wakes. Must not ask or wait (docs/threads.md). May be none.
template <class Event>
using Heard = std::function<void(std::span<const Event>)>;

// What became of each transfer so far, for threads that wait for it.
template <class Ended>
class Ledger {
 public:
  struct Entry {
    std::set<LayerId> layers;  // released, or landed
    std::optional<Ended> ended;
    bool released = false;
  };

  void open(const TransferKey& key) {
    const std::lock_guard lock(mutex_);
    entries_[key] = {};
  }
  void forget(const TransferKey& key) {
    const std::lock_guard lock(mutex_);
    entries_.erase(key);
  }
  template <class Change>
  void change(const TransferKey& key, Change change) {
    const std::lock_guard lock(mutex_);
    const auto at = entries_.find(key);
    if (at == entries_.end()) return;
    change(at->second);
    if (!at->second.released) return;
    over_.push_back(key);
    if (over_.size() <= kKept) return;
    entries_.erase(over_.front());
    over_.pop_front();
  }
  void tell() { changed_.notify_all(); }

  // Waits until `done` holds of the entry.  @error invalid_argument: no such transfer; deadline; cancelled: interrupted
  template <class Done>
  Expected<Entry> wait(const TransferKey& key, std::chrono::nanoseconds at_most, Done done, const char* what,
                       const Interrupt& interrupt) {
    constexpr std::chrono::nanoseconds kMost = std::chrono::hours(24 * 365);
    const auto until = std::chrono::steady_clock::now() + std::min(at_most, kMost);
    std::unique_lock lock(mutex_);
    for (;;) {
      const auto at = entries_.find(key);
      if (at == entries_.end()) return fail(Code::invalid_argument, "transfer {} is not known here", to_string(key));
      if (done(at->second)) return at->second;
      if (const auto now = std::chrono::steady_clock::now(); now >= until)
        return fail(Code::deadline, "transfer {}: {} after {} ms", to_string(key), what, at_most / std::chrono::milliseconds(1));
      else
        changed_.wait_until(lock, interrupt ? std::min(until, now + kLook) : until);
      if (!interrupt) continue;
      lock.unlock();  // what it asks may take a lock of its own
      const bool ended = interrupt();
      lock.lock();
      if (ended) return fail(Code::cancelled, "transfer {}: {}, and the wait was interrupted", to_string(key), what);
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<TransferKey, Entry> entries_;
  std::deque<TransferKey> over_;
};

class SourceSession {
 public:
  // @error as SourceEndpoint::make.  @pre the transport outlives it
  static Expected<std::unique_ptr<SourceSession>> make(SourceOptions options, Transport& transport, LocalCache cache,
                                                       Sinks sinks = {}, Heard<SourceEvent> heard = {});

  const std::string& address() const { return address_; }

  Expected<void> offer(const Offer& offer);
  Expected<void> set_table(const TransferKey& key, std::int32_t group, CacheTable table);
  void ready(const TransferKey& key, LayerId layer, std::int64_t tokens, std::shared_ptr<DeviceWork> after = nullptr);
  Expected<void> payload(const TransferKey& key, std::vector<std::byte> bytes);
  void cancel(const TransferKey& key, std::string why);

  // Also where a cancel has let go of it.
  // @error deadline; invalid_argument: not offered, or forgotten; else why the transfer is over without it
  Expected<void> wait_layer_released(const TransferKey& key, LayerId layer, std::chrono::nanoseconds at_most,
                                     const Interrupt& interrupt = {});
  // Until it is over, whatever the outcome.  @error deadline; invalid_argument
  Expected<SourceEnded> wait(const TransferKey& key, std::chrono::nanoseconds at_most, const Interrupt& interrupt = {});
  Expected<void> wait_released(const TransferKey& key, std::chrono::nanoseconds at_most, const Interrupt& interrupt = {});
  void forget(const TransferKey& key) { ledger_.forget(key); }
  // As the endpoint has them, after what was posted before.
  std::size_t open();
  SourceEndpoint::Counts counts();
  // Runs it on the session's thread, which owns the transport: to register memory, or to let go of it.
  void run_on_thread(const std::function<void()>& work);

 private:
  SourceSession(std::unique_ptr<SourceEndpoint> endpoint, Transport& transport, Heard<SourceEvent> heard);
  void note(std::vector<SourceEvent>& events);

  std::string address_;
  Heard<SourceEvent> heard_;
  Ledger<SourceEnded> ledger_;
  EndpointThread<SourceEndpoint, SourceEvent> thread_;
};

class TargetSession {
 public:
  // @error as TargetEndpoint::make.  @pre the transport outlives it
  static Expected<std::unique_ptr<TargetSession>> make(TargetOptions options, Transport& transport, Sinks sinks = {},
                                                       Heard<TargetEvent> heard = {});

  Expected<GeometryId> describe(LocalCache cache);
  void forget(GeometryId geometry);  // no transfer begins there any more
  Expected<void> begin(Want want);
  void cancel(const TransferKey& key, std::string why);

  // Until all bytes of this layer and of ours below it are there and visible.
  // @error deadline; invalid_argument: not begun, or forgotten; else why the transfer is over without it
  Expected<void> wait_layer(const TransferKey& key, LayerId layer, std::chrono::nanoseconds at_most,
                            const Interrupt& interrupt = {});
  // Until it is over, whatever the outcome.  @error deadline; invalid_argument
  Expected<TargetEnded> wait(const TransferKey& key, std::chrono::nanoseconds at_most, const Interrupt& interrupt = {});
  // Until the pages are the engine's again.  @error deadline: still in quarantine; invalid_argument
  Expected<void> wait_released(const TransferKey& key, std::chrono::nanoseconds at_most, const Interrupt& interrupt = {});
  void forget(const TransferKey& key) { ledger_.forget(key); }
  // As the endpoint has them, after what was posted before.
  std::size_t open();
  Bytes covered(const TransferKey& key);
  // As SourceSession's: memory for another geometry is registered there, then described.
  void run_on_thread(const std::function<void()>& work);

 private:
  TargetSession(std::unique_ptr<TargetEndpoint> endpoint, Transport& transport, Heard<TargetEvent> heard);
  void note(std::vector<TargetEvent>& events);

  Heard<TargetEvent> heard_;
  Ledger<TargetEnded> ledger_;
  EndpointThread<TargetEndpoint, TargetEvent> thread_;
};

}  // namespace kvloom
