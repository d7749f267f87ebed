// fake_driver.h: a CUDA driver for machines without a GPU: two GPUs of host memory (fake_memory.h), streams that run at once or when a test says
// so, and errors where a test wants them.  What the CUDA transport does with the driver is tested through it, on any machine.
// Law: a call that cuda.h calls an error is one here, with the code that the real driver gives as far as it is known. An operation of a stream
// is checked when it is called and again when it runs: memory that went away meanwhile is CUDA_ERROR_ILLEGAL_ADDRESS, as on a GPU.
// Errors that CUDA calls sticky end a GPU for this process: all later calls on it give the same error.
// One machine a process, as CUDA's functions take no object: a test that counts or breaks things begins with reset(). Across processes only
// memory is shared.  Thread: any; one lock.  Source: cuda.h of CUDA 13.0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kvloom/transport/cuda/driver.h"

namespace kvloom::cuda {

std::shared_ptr<const Driver> fake_driver();

namespace fake {

// Frees everything, lets everything run, heals both GPUs, forgets counts and wishes.  @pre nobody uses the driver
void reset();

// From now on operations of streams wait, in the order of their calls.  Waiting for a stream (cuStreamSynchronize) runs its operations all the
// same: that is how time passes.
void hold();
// Runs the next n of them that may run: the first of its stream, and what it waits for is there.  Returns how many did.
std::size_t release(std::size_t n);
// Ends hold.
void release_all();
std::size_t held();

// The next call of this name ("cuMemcpy2DAsync", without _v2) fails and does nothing.
void fail_next(std::string_view call, CUresult result);
// The next operation that this call puts on a stream fails when it runs, as errors of a GPU do: its GPU is broken from then on.
void fail_when_run(std::string_view call, CUresult result);

// How often it was called since the last reset.
std::int64_t calls(std::string_view name);

// Calls since the last reset that a real driver would have kept until a word is written that a stream waits for: who should write it may
// be the caller. Here they come back at once, so that a test does not hang.
std::vector<std::string> stuck();

// Between the two GPUs; there is after reset.
void set_peer_access(bool there);

// What stands, of this process: equal before and after a test that leaks nothing.
struct Live {
  std::int64_t allocations = 0;   // cuMemAlloc
  std::int64_t pinned = 0;        // cuMemHostAlloc
  std::int64_t registered = 0;    // cuMemHostRegister
  std::int64_t opened = 0;        // cuIpcOpenMemHandle, once an allocation
  std::int64_t handles = 0;       // VMM: references
  std::int64_t mappings = 0;      // VMM
  std::int64_t reservations = 0;  // VMM
  std::int64_t streams = 0;
  std::int64_t events = 0;
  std::int64_t modules = 0;
  std::int64_t contexts = 0;  // references to the primary ones

  friend bool operator==(const Live&, const Live&) = default;
};
Live live();
// "allocations=1 pinned=0 ..."
std::string to_string(const Live& live);

}  // namespace fake
}  // namespace kvloom::cuda
