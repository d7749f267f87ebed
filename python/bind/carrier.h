// carrier.h: a transport, and memory lent to it, as Python has them: usable from any of its threads, in any order of letting go.  Stage: python.
// A Transport belongs to one thread at a time and aborts the process if another calls it. Python's objects are let go of wherever the last
// reference dies, so here every call goes through `use`: under a lock, on the session's thread while there is one, else by the caller's.
// Law: whatever is called from whichever thread, the transport has one user at a time, and outlives its regions and its session.
// A forked child has none of the threads, and shares sockets that it must not touch: there calls are refused, and what is let go of stays.
// Owners: a Carrier is shared by Python's Transport, its regions and its session; a Lent by Python's Region, arrays over it, and the sessions
// whose caches lie in it.  Thread: any.  Without the GIL, but where it says so.
#pragma once

#include <nanobind/ndarray.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "kvloom/transport/device_work.h"
#include "kvloom/transport/transport.h"
#include "python/bind/bind.h"

namespace kvloom::python {

class Carrier {
 public:
  // `device`: of its GPU; none: host memory
  explicit Carrier(std::unique_ptr<Transport> transport, std::optional<int> device = std::nullopt)
      : transport_(std::move(transport)), device_(device), abilities_(transport_->abilities()), address_(transport_->address()) {}

  Carrier(const Carrier&) = delete;
  Carrier& operator=(const Carrier&) = delete;
  ~Carrier() {
    if (is_forked()) std::ignore = transport_.release();
  }

  bool is_forked() const { return getpid() != process_; }
  // @error unsupported
  void check_process() const {
    if (is_forked())
      refuse(Code::unsupported,
             "this process was forked from one that had the transport: make another here, or spawn instead of forking");
  }

  const Abilities& abilities() const { return abilities_; }
  const std::string& address() const { return address_; }
  std::optional<int> device() const { return device_; }
  // For what asks no thread.
  const Transport& transport() const { return *transport_; }

  // Runs `work(Transport&)` as the transport's owner and gives what it gives.  @pre not called from a session's thread
  template <class Work>
  auto use(Work work) {
    check_process();
    const std::lock_guard lock(mutex_);
    std::optional<decltype(work(*transport_))> out;
    const auto there = [&] { out.emplace(work(*transport_)); };
    if (on_session_) {
      on_session_(there);
    } else {
      transport_->take_over();
      there();
    }
    return std::move(*out);
  }

  // Makes the one session of this transport.  @error invalid_argument: it has one; what `make(Transport&)` refuses
  template <class Make>
  auto start(Make make) -> decltype(make(std::declval<Transport&>())) {
    check_process();
    const std::lock_guard lock(mutex_);
    if (on_session_)
      return fail(Code::invalid_argument, "this transport carries a session already: close that one, or make another transport");
    transport_->take_over();
    auto session = make(*transport_);
    if (session) on_session_ = [at = session->get()](const std::function<void()>& work) { at->run_on_thread(work); };
    return session;
  }
  template <class Session>
  void stop(std::unique_ptr<Session>& session) {
    const std::lock_guard lock(mutex_);
    on_session_ = nullptr;
    session.reset();
  }

 private:
  std::mutex mutex_;  // held by whoever uses the transport
  std::unique_ptr<Transport> transport_;
  std::optional<int> device_;
  pid_t process_ = getpid();
  Abilities abilities_;
  std::string address_;
  std::function<void(const std::function<void()>&)> on_session_;
};

// A Region.  @pre the GIL where it is let go of: the memory of Python under it is then let go of too
struct Lent {
  std::shared_ptr<Carrier> carrier;
  Region region;
  bool allocated = false;  // by the transport
  bool on_device = false;  // its memory is the GPU's
  nb::ndarray<> memory;    // that was registered, held by its DLPack capsule or buffer; else none
  nb::object owner;        // of memory that was registered by its address; may be none

  Lent(std::shared_ptr<Carrier> of, Region made, bool was_allocated, bool is_on_device)
      : carrier(std::move(of)), region(std::move(made)), allocated(was_allocated), on_device(is_on_device) {}
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;
  ~Lent() {
    if (carrier->is_forked()) {
      new Region(std::move(region));  // for ever
      return;
    }
    const nb::gil_scoped_release free;
    carrier->use([&](Transport&) { return std::exchange(region, Region()).length(); });
  }
};

// What a session's thread may be the last to let go of: by a pointer of C++, since one of Python's would take the GIL there.
struct Work {
  std::shared_ptr<DeviceWork> work;
};
struct Gate {
  std::shared_ptr<LayerGate> gate;
};

// ---- cuda.cc, or cuda_none.cc where CUDA is not built: CMake picks ----

std::shared_ptr<Carrier> open_cuda(const std::string& listen, int device, bool allocate_on_host);  // @error unsupported
std::shared_ptr<DeviceWork> record_work(const Carrier& carrier, std::uintptr_t stream);  // @error unsupported: no GPU's transport
std::shared_ptr<LayerGate> make_gate(const Carrier& carrier);
void wait_at(const LayerGate& gate, std::uintptr_t stream, LayerId layer);

}  // namespace kvloom::python
