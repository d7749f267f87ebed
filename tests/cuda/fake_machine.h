// fake_machine.h: the state behind fake_driver.h: contexts, streams and what waits on them.
// An operation belongs to a stream; operations of one stream run in order, of different streams in any order that events and words allow.
// Thread: whoever holds `mutex`, as every call does.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "kvloom/transport/cuda/copy_items.h"
#include "tests/cuda/fake_driver.h"
#include "tests/cuda/fake_memory.h"

namespace kvloom::cuda::fake {

struct Stream {
  int device = 0;
  int priority = 0;
  std::size_t open = 0;  // operations that have not run
};

struct Event {
  int device = 0;
  std::uint64_t recorded = 0, done = 0;  // counts of cuEventRecord
};

struct Kernel {
  int device = 0;
  std::string name;
};

struct Module {
  int device = 0;
  std::vector<std::unique_ptr<Kernel>> kernels;
};

struct Operation {
  std::shared_ptr<Stream> stream;
  std::function<bool()> ready;    // empty: always
  std::function<CUresult()> run;  // an error breaks the GPU
  bool at_word = false;           // waits for a word that the host writes
};

struct Context {
  int device = 0;
  int retained = 0;
  CUresult broken = CUDA_SUCCESS;
};

class Machine {
 public:
  Machine();

  std::mutex mutex;
  std::unique_ptr<Memory> memory = std::make_unique<Memory>();
  std::array<Context, kGpus> contexts;
  std::array<std::shared_ptr<Stream>, kGpus> default_streams;
  std::map<const void*, std::shared_ptr<Stream>> streams;
  std::map<const void*, std::shared_ptr<Event>> events;
  std::map<const void*, std::unique_ptr<Module>> modules;
  std::map<std::string, std::int64_t, std::less<>> calls;
  std::map<std::string, CUresult, std::less<>> fail_next, fail_when_run;
  std::list<Operation> operations;
  std::vector<std::string> stuck;  // calls
  bool held = false;
  bool peer_access = true;

  // Of the calling thread; null: none.
  Context* current();
  static std::vector<Context*>& stack();

  CUcontext handle_of(Context& context) { return reinterpret_cast<CUcontext>(&context); }
  Context* context_of(CUcontext handle);
  std::shared_ptr<Stream> stream_of(CUstream handle);  // null: there is none
  std::shared_ptr<Event> event_of(CUevent handle);

  // `call`: for fail_when_run.
  void submit(std::string_view call, Operation operation);
  // Runs up to `most` operations, of `only` this stream if one is given.
  std::size_t pump(std::size_t most, const Stream* only = nullptr);
  // A stream waits for a word that nobody has written.
  bool waits_at_word();
  void settle() {
    if (!held) pump(operations.size());
  }

 private:
  bool run_next(const Stream* only);
};

Machine& machine();

// Short words for the calls.
inline Machine& m() { return machine(); }
inline Memory& memory() { return *m().memory; }
inline Context& context(CUdevice gpu) { return m().contexts[static_cast<std::size_t>(gpu)]; }
inline int device() { return m().current()->device; }  // @pre there is a current context
inline void* host(CUdeviceptr at) { return reinterpret_cast<void*>(at); }

// fake_cuInit and so on, each of the driver's own type. fake_driver.cc: devices, contexts, memory; fake_work.cc: what goes on streams.
#define KVLOOM_FAKE_DECLARE(call) std::remove_pointer_t<decltype(Driver::call)> fake_##call;
KVLOOM_CUDA_CALLS(KVLOOM_FAKE_DECLARE)
#undef KVLOOM_FAKE_DECLARE

// The copy kernel, on a CPU, by the functions of copy_items.h.
CUresult run_copy_items(const Memory& memory, int device, std::span<const CopyItem> items);

}  // namespace kvloom::cuda::fake
