// endpoint_thread.h: a thread for an endpoint, so that an engine may talk to it from any of its own.  Stage: stream.
// What is posted runs on the endpoint's thread, in order. Nobody waits for it but who asks to; between two posts the endpoint polls.
// Thread: `post` and `ask` from any; the rest by whoever made it.  While it runs, the endpoint and its transport belong to its thread.
#pragma once

#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "kvloom/transport/transport.h"

namespace kvloom {

// A descriptor that one thread makes readable to wake another.
class WakeUp {
 public:
  WakeUp() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}
  WakeUp(const WakeUp&) = delete;
  WakeUp& operator=(const WakeUp&) = delete;
  ~WakeUp() { ::close(fd_); }
  int fd() const { return fd_; }
  void ring() const { eventfd_write(fd_, 1); }
  void quiet() const {
    eventfd_t count = 0;
    eventfd_read(fd_, &count);
  }

 private:
  int fd_;
};

template <class Endpoint, class Event>
class EndpointThread {
 public:
  using Work = std::function<void(Endpoint&)>;

  // `told`: called on the thread with what happened, in order.  @pre the transport outlives it, and was not used by anyone since
  EndpointThread(std::unique_ptr<Endpoint> endpoint, Transport& transport, std::function<void(std::vector<Event>&)> told)
      : endpoint_(std::move(endpoint)), transport_(transport), told_(std::move(told)), thread_([this] { run(); }) {}
  EndpointThread(const EndpointThread&) = delete;
  EndpointThread& operator=(const EndpointThread&) = delete;
  ~EndpointThread() { stop(); }

  // @pre not stopped
  void post(Work work) {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    if (work_.size() == 1) wake_.ring();  // under the lock: the descriptor is readable just as long as there is work
  }

  // Runs `ask` there and gives what it gives.  @pre not stopped; not called from the endpoint's thread
  template <class Ask>
  auto ask(Ask ask) -> decltype(ask(std::declval<Endpoint&>())) {
    std::promise<decltype(ask(std::declval<Endpoint&>()))> answer;
    post([&](Endpoint& endpoint) { answer.set_value(ask(endpoint)); });
    return answer.get_future().get();
  }

  // What was posted before still runs. After it, the caller's thread owns the transport.
  void stop() {
    if (!thread_.joinable()) return;
    post([this](Endpoint&) { stopping_ = true; });
    thread_.join();
    transport_.take_over();
    endpoint_.reset();
  }

 private:
  void run() {
    transport_.take_over();
    prctl(PR_SET_TIMERSLACK, 1000);  // ns: naps beside a device are a few microseconds
    std::vector<Event> events;
    while (!stopping_) {
      do_work();
      events.clear();
      endpoint_->poll(stopping_ ? std::chrono::seconds(0) : kMost, events, wake_.fd());
      if (!events.empty()) told_(events);
    }
  }

  void do_work() {
    std::vector<Work> work;
    {
      const std::lock_guard lock(mutex_);
      if (work_.empty()) return;
      wake_.quiet();
      work.swap(work_);
    }
    for (const Work& each : work) each(*endpoint_);
  }

  static constexpr std::chrono::seconds kMost{60};

  std::unique_ptr<Endpoint> endpoint_;
  Transport& transport_;
  std::function<void(std::vector<Event>&)> told_;
  WakeUp wake_;
  std::mutex mutex_;  // guards work_
  std::vector<Work> work_;
  bool stopping_ = false;  // of the thread
  std::thread thread_;     // last: it uses all of the above
};

}  // namespace kvloom
