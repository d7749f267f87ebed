// sessions.h: a session as Python holds it: closed once, by anybody, whoever is inside of a call; and its events, kept until they are asked for.
// Stage: python.
// Law: a call that began before close() ends in its own time (one that waits, within kLook) and close() returns after it; a later one is refused.
// Memory: events are kept only where they were wished for, until poll() takes them.
// Thread: any.  Without the GIL, but where it says so; nothing here is called with a lock of ours held by a thread that wants the GIL.
#pragma once

#include <poll.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvloom/session/sessions.h"
#include "python/bind/carrier.h"

namespace kvloom::python {

// Made by a session's thread, taken by any of Python's.
template <class Event>
class EventQueue {
 public:
  void push(std::span<const Event> events) {
    const std::lock_guard lock(mutex_);
    events_.insert(events_.end(), events.begin(), events.end());
    bell_.ring();
  }
  std::vector<Event> take() {
    const std::lock_guard lock(mutex_);
    bell_.quiet();  // under the lock: the descriptor is readable just as long as there is something
    return std::exchange(events_, {});
  }
  // Until there is something.  False: not within that time
  bool wait(std::chrono::nanoseconds at_most) const {
    pollfd fd{bell_.fd(), POLLIN, 0};
    return ::poll(&fd, 1, static_cast<int>(at_most / std::chrono::milliseconds(1)) + 1) > 0;
  }
  int fd() const { return bell_.fd(); }

 private:
  std::mutex mutex_;  // guards events_
  std::vector<Event> events_;
  WakeUp bell_;
};

// A rank's memory under one geometry, and the regions that it lies in.
struct HeldCache {
  LocalCache cache;
  std::shared_ptr<Carrier> carrier;  // of all of them; none: no regions
  std::vector<std::shared_ptr<Lent>> regions;
};

// What a session is told about itself.
struct SinkWords {
  std::string side;  // "prefill", "decode"
  Rank rank;         // label of metrics
  std::string name;
  std::string log;  // a level, for lines on stderr; empty: none
  bool trace = false, events = false;
};
Sinks make_sinks(const SinkWords& words, Metrics& metrics, Trace* trace);

// The sessions of this process, so that they are closed before Python is: its threads that wait in one would wake without an interpreter, and
// C++ has no word for the way in which Python ends such a thread.  Guarded by the GIL.
class OpenSession {
 public:
  OpenSession() { all().insert(this); }
  OpenSession(const OpenSession&) = delete;
  OpenSession& operator=(const OpenSession&) = delete;
  virtual ~OpenSession() { all().erase(this); }

  virtual void close() = 0;
  virtual bool closed() const = 0;
  virtual nb::object self() = 0;  // Python's object
  bool waited_in() const { return waiting_ > 0; }

  static void close_all();  // for Python's atexit

 protected:
  // One call that waits, from before it lets go of the GIL until it has it again.
  class Waiting {
   public:
    explicit Waiting(OpenSession& in) : in_(in) { ++in_.waiting_; }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    ~Waiting() { --in_.waiting_; }

   private:
    OpenSession& in_;
  };

 private:
  static std::set<OpenSession*>& all();
  int waiting_ = 0;
};

template <class Session, class Event>
class HeldSession : public OpenSession {
 public:
  HeldSession(std::shared_ptr<Carrier> carrier, const SinkWords& words)
      : carrier_(std::move(carrier)), words_(words), metrics_(words.side, words.rank) {
    if (words.trace) trace_.emplace(fmt::format("{} rank {}", words.side, words.rank.value), static_cast<std::int64_t>(getpid()));
  }
  ~HeldSession() override { HeldSession::close(); }

  // `make(Transport&, Sinks, Heard<Event>)`.
  template <class Make>
  void start(Make make) {
    const nb::gil_scoped_release free;
    session_ = take(carrier_->start([&](Transport& transport) {
      Heard<Event> heard;
      if (words_.events) heard = [this](std::span<const Event> events) { events_.push(events); };
      return make(transport, make_sinks(words_, metrics_, trace_ ? &*trace_ : nullptr), std::move(heard));
    }));
  }

  // @pre the GIL
  void close() final {
    if (carrier_->is_forked()) {
      std::ignore = session_.release();  // its thread is not here
      closing_ = true;
      return;
    }
    closing_ = true;
    {
      const nb::gil_scoped_release free;
      const std::unique_lock lock(use_);
      if (session_) carrier_->stop(session_);
    }
    regions_.clear();
  }

  // @error invalid_argument: it was closed
  template <class Call>
  auto call(Call call) {
    carrier_->check_process();
    const std::shared_lock lock(use_);
    if (!session_ || closing_) refuse(Code::invalid_argument, "this session was closed");
    return call(*session_);
  }
  // A call that waits, and ends early where the session is closed or a signal's function has raised.  @pre the GIL
  template <class Wait>
  auto wait(Wait wait) {
    const Waiting waiting(*this);
    auto out = [&] {
      const nb::gil_scoped_release free;
      return call([&](Session& session) { return wait(session, Interrupt([this] { return closing_ || signalled(); })); });
    }();
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    return take(std::move(out));
  }
  // @error invalid_argument: events were not wished for.  @pre the GIL
  std::vector<Event> poll(double at_most) {
    want_events();
    const Waiting waiting(*this);
    const auto until = std::chrono::steady_clock::now() + to_duration(std::min(at_most, 1e9));
    std::vector<Event> taken;
    bool rang = false;  // a signal's function has raised: events stay for the next call
    {
      const nb::gil_scoped_release free;
      while (!closing_ && !rang) {
        const auto left = until - std::chrono::steady_clock::now();
        if (left <= left.zero() || events_.wait(std::min<std::chrono::nanoseconds>(left, kLook))) break;
        rang = signalled();
      }
      if (!rang) taken = events_.take();
    }
    if (rang) throw nb::python_error();
    return taken;
  }
  int fileno() const {
    want_events();
    return events_.fd();
  }

  // A region belongs to one transport, and stands as long as a session's cache lies in it.  @pre the GIL
  void keep(const HeldCache& cache) { regions_.insert(regions_.end(), cache.regions.begin(), cache.regions.end()); }
  std::string metrics() const { return metrics_.text(); }
  std::string trace() const {
    if (!trace_) refuse(Code::invalid_argument, "this session keeps no trace: make it with trace=True");
    return trace_->json();
  }
  bool closed() const final { return closing_; }

 private:
  void want_events() const {
    carrier_->check_process();  // a descriptor is shared with it
    if (!words_.events) refuse(Code::invalid_argument, "this session keeps no events: make it with events=True");
  }
  static bool signalled() {
    const nb::gil_scoped_acquire gil;
    return PyErr_CheckSignals() != 0;
  }

  std::shared_ptr<Carrier> carrier_;
  SinkWords words_;
  Metrics metrics_;
  std::optional<Trace> trace_;
  EventQueue<Event> events_;
  std::vector<std::shared_ptr<Lent>> regions_;  // guarded by the GIL
  std::shared_mutex use_;                       // shared: session_ stays; alone: it goes
  std::atomic<bool> closing_ = false;
  std::unique_ptr<Session> session_;
};

}  // namespace kvloom::python
