// random.h: numbers from a seed, the same everywhere (the standard's distributions are not).  Values only.
// Source: Vigna, splitmix64 (public domain constants).
#pragma once

#include <cstdint>

namespace kvloom::sim {

constexpr std::uint64_t mix(std::uint64_t z) {
  z += 0x9e3779b97f4a7c15U;
  z = (z ^ (z >> 30U)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27U)) * 0x94d049bb133111ebU;
  return z ^ (z >> 31U);
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(mix(seed)) {}
  std::uint64_t next() { return mix(state_++); }
  // [least, most]
  std::int64_t between(std::int64_t least, std::int64_t most) {
    return least + static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(most - least + 1));
  }
  bool chance(double probability) { return static_cast<double>(next() >> 11U) * 0x1.0p-53 < probability; }
  template <class Container>
  const auto& one_of(const Container& from) {
    return from[static_cast<std::size_t>(between(0, static_cast<std::int64_t>(from.size()) - 1))];
  }

 private:
  std::uint64_t state_;
};

}  // namespace kvloom::sim
