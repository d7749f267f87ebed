// units.h: quantities and ids as types, and products that say when they overflow.  Values only.
// A Quantity adds, subtracts and scales; two of one kind divide to a plain number. An Id only compares: an id is not a number.
#pragma once

#include <compare>
#include <cstdint>
#include <limits>
#include <optional>

namespace kvloom {

template <class Tag>
struct Quantity {
  std::int64_t value = 0;

  constexpr Quantity() = default;
  constexpr explicit Quantity(std::int64_t v) : value(v) {}

  friend constexpr auto operator<=>(Quantity, Quantity) = default;
  friend constexpr Quantity operator+(Quantity a, Quantity b) { return Quantity(a.value + b.value); }
  friend constexpr Quantity operator-(Quantity a, Quantity b) { return Quantity(a.value - b.value); }
  friend constexpr Quantity operator-(Quantity a) { return Quantity(-a.value); }
  friend constexpr Quantity operator*(Quantity a, std::int64_t n) { return Quantity(a.value * n); }
  friend constexpr Quantity operator*(std::int64_t n, Quantity a) { return Quantity(a.value * n); }
  friend constexpr std::int64_t operator/(Quantity a, Quantity b) { return a.value / b.value; }
  constexpr Quantity& operator+=(Quantity b) {
    value += b.value;
    return *this;
  }
  constexpr Quantity& operator-=(Quantity b) {
    value -= b.value;
    return *this;
  }
};

using Bytes = Quantity<struct BytesTag>;
using Tokens = Quantity<struct TokensTag>;

template <class Tag, class Rep>
struct Id {
  Rep value = 0;

  constexpr Id() = default;
  constexpr explicit Id(Rep v) : value(v) {}
  friend constexpr auto operator<=>(Id, Id) = default;
};

using PageId = Id<struct PageTag, std::int64_t>;    // a page of one pool, 0-based
using LayerId = Id<struct LayerTag, std::int32_t>;  // a layer of the model, 0-based; draft layers follow the model's
using Rank = Id<struct RankTag, std::int32_t>;      // a rank of one side, 0-based
using Epoch = Id<struct EpochTag, std::uint64_t>;   // an attempt at a transfer

// For products that are looked at before they are known to fit.
__extension__ using Wide = __int128;

// a * b and a + b, or nothing if that does not fit.  For every product of numbers that came from outside.
constexpr std::optional<std::int64_t> checked_mul(std::int64_t a, std::int64_t b) {
  std::int64_t out = 0;
  if (__builtin_mul_overflow(a, b, &out)) return std::nullopt;
  return out;
}

constexpr std::optional<std::int64_t> checked_add(std::int64_t a, std::int64_t b) {
  std::int64_t out = 0;
  if (__builtin_add_overflow(a, b, &out)) return std::nullopt;
  return out;
}

// @pre b > 0
constexpr std::int64_t floor_div(std::int64_t a, std::int64_t b) { return a / b - static_cast<std::int64_t>(a % b < 0); }
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a / b + static_cast<std::int64_t>(a % b > 0); }
constexpr std::int64_t floor_mod(std::int64_t a, std::int64_t b) { return a - floor_div(a, b) * b; }

}  // namespace kvloom
