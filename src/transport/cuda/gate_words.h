// gate_words.h: the pinned words at which streams wait (device_work.h).  Stage: carry.
// They are kept and used again, for to free pinned memory waits for all of a GPU's work, and so for the streams that wait at other gates.
// Law: a word only rises, modulo 2^32, by kSpan a gate: a stream that comes late to the word of a gate that is over, and used by another
// one since, goes on at once (for 2^31 / kSpan gates of that word). Streams compare by the sign of the difference.
// Owner: a Gpu.  Thread: any.  Source: CU_STREAM_WAIT_VALUE_GEQ in cuda.h.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "kvloom/transport/cuda/driver.h"

namespace kvloom::cuda {

class GateWords {
 public:
  static constexpr std::uint32_t kSpan = 1U << 17;  // above the most layers that a cache has

  struct Word {
    std::uint32_t* host = nullptr;
    CUdeviceptr device = 0;
    std::uint32_t base = 0;  // what stands there while no layer has landed
  };

  GateWords() = default;
  GateWords(const GateWords&) = delete;
  GateWords& operator=(const GateWords&) = delete;

  // @pre the GPU's context is current    @error io: no pinned memory
  Expected<Word> take(const Driver& driver);
  // @pre base + kSpan stands there
  void put_back(Word word);
  // @pre the context is current, and no word is out
  void free_all(const Driver& driver);

 private:
  static constexpr std::size_t kPage = 4096, kLine = 64;  // bytes of an allocation, and from word to word

  std::mutex mutex_;
  std::vector<void*> pages_;
  std::vector<Word> free_;
};

}  // namespace kvloom::cuda
