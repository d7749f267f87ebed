// flat_root.h: a peer's bytes as a FlatBuffers table, after they were looked over.  Part: bytes that other processes sent.  Internal to .cc
// files that decode.  The verifier proves pointers and lengths, never numbers: those are still the peer's.
#pragma once

#include <flatbuffers/flatbuffers.h>

#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "kvloom/base/error.h"

namespace kvloom {

struct FlatFormat {
  const char* what;        // "message": for errors
  const char* identifier;  // four characters
  std::uint32_t version;   // in the first field of every root, in all versions: read before anything else is looked at
  std::size_t max_bytes, max_depth, max_tables;
};

// Numbers are read in place, but a peer's buffer may begin anywhere: bytes that begin at an odd address are copied.
// @pre the bytes outlive it, and nobody writes to them meanwhile
template <class Root>
class FlatRoot {
 public:
  // @error exhausted: too many bytes; parse: not such bytes, cut short, pointing outside of themselves; unsupported: another version
  static Expected<FlatRoot> make(std::span<const std::uint8_t> bytes, const FlatFormat& format) {
    if (bytes.size() > format.max_bytes)
      return fail(Code::exhausted, "a {} of {} B: at most {} are read", format.what, bytes.size(), format.max_bytes);
    FlatRoot out(bytes);
    constexpr std::size_t kLeast = 2 * sizeof(flatbuffers::uoffset_t);  // the root and the identifier
    if (bytes.size() < kLeast || !flatbuffers::BufferHasIdentifier(out.data_, format.identifier))
      return fail(Code::parse, "{} B that do not begin as a {} does ('{}')", bytes.size(), format.what, format.identifier);
    const auto damaged = [&] {
      return fail(Code::parse, "a {} of {} B that is damaged or cut short", format.what, bytes.size());
    };
    flatbuffers::Verifier shallow(out.data_, bytes.size(), 1, 1);
    if (!shallow.VerifyBuffer<Versioned>(format.identifier)) return damaged();
    const std::uint32_t version = flatbuffers::GetRoot<Versioned>(out.data_)->version();
    if (version != format.version)
      return fail(Code::unsupported, "a {} of version {}: this kvloom reads version {}", format.what, version, format.version);
    flatbuffers::Verifier verifier(out.data_, bytes.size(), static_cast<flatbuffers::uoffset_t>(format.max_depth),
                                   static_cast<flatbuffers::uoffset_t>(format.max_tables));
    if (!verifier.VerifyBuffer<Root>(format.identifier)) return damaged();
    return out;
  }
  const Root* operator->() const { return flatbuffers::GetRoot<Root>(data_); }
  const Root& operator*() const { return *flatbuffers::GetRoot<Root>(data_); }

 private:
  struct Versioned : private flatbuffers::Table {
    static constexpr flatbuffers::voffset_t kVersion = 4;  // the first field
    std::uint32_t version() const { return GetField<std::uint32_t>(kVersion, 0); }
    bool Verify(flatbuffers::Verifier& verifier) const {
      return VerifyTableStart(verifier) && VerifyField<std::uint32_t>(verifier, kVersion, sizeof(std::uint32_t)) &&
             verifier.EndTable();
    }
  };

  explicit FlatRoot(std::span<const std::uint8_t> bytes) : data_(bytes.data()) {
    constexpr std::uintptr_t kWidest = sizeof(std::uint64_t);
    if (reinterpret_cast<std::uintptr_t>(data_) % kWidest == 0) return;
    copy_.assign(bytes.begin(), bytes.end());
    data_ = copy_.data();
  }

  std::vector<std::uint8_t> copy_;  // its memory stays where it is when this moves
  const std::uint8_t* data_;
};

// A struct of a vector as a value: the verifier sees to it that its bytes are there, but not that they are aligned.
template <class Struct>
Struct flat_copy(const void* from) {
  Struct out;
  std::memcpy(static_cast<void*>(&out), from, sizeof out);
  return out;
}

inline std::vector<std::uint8_t> flat_bytes(const flatbuffers::FlatBufferBuilder& builder) {
  return {builder.GetBufferPointer(), builder.GetBufferPointer() + builder.GetSize()};
}

}  // namespace kvloom
