#include "kvloom/session/connection.h"

#include <cstring>
#include <random>

#include "kvloom/base/flat_root.h"
#include "kvloom/geometry/sharding.h"
#include "kvloom/plan/wire.h"
#include "kvloom/session/connection_generated.h"
#include "kvloom/session/wire.h"

namespace kvloom {
namespace {

using flatbuffers::FlatBufferBuilder;
using flatbuffers::Offset;

std::span<const std::uint8_t> octets(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()};
}

// ---- writing ----

Offset<flatbuffers::Vector<std::uint8_t>> vector(FlatBufferBuilder& to, std::span<const std::uint8_t> bytes) {
  return to.CreateVector(bytes.data(), bytes.size());
}

Offset<wire::Hello> write(FlatBufferBuilder& to, const Hello& hello) {
  const auto name = to.CreateString(hello.name), transport = to.CreateString(hello.transport);
  return wire::CreateHello(to, hello.incarnation, hello.capabilities, hello.rank.value, name, transport);
}
Offset<wire::Welcome> write(FlatBufferBuilder& to, const Welcome& welcome) {
  const auto name = to.CreateString(welcome.name);
  const auto side = vector(to, welcome.side);
  return wire::CreateWelcome(to, welcome.incarnation, welcome.capabilities, welcome.rank.value, name, side);
}
Offset<wire::Geometry> write(FlatBufferBuilder& to, const Geometry& geometry) {
  std::vector<Offset<wire::RegionKey>> regions;
  for (const RegionKey& region : geometry.regions) {
    const auto key = vector(to, octets(region.key));
    regions.push_back(wire::CreateRegionKey(to, region.length.value, key));
  }
  std::vector<Offset<wire::Tensor>> tensors;
  for (const PlacedTensor& tensor : geometry.tensors) {
    std::vector<wire::Part> parts;
    for (const TensorPart& part : tensor.parts)
      parts.emplace_back(part.begin.value, part.length.value, part.region_offset.value, part.region);
    tensors.push_back(wire::CreateTensor(to, tensor.group, tensor.layer.value, to.CreateVectorOfStructs(parts)));
  }
  const auto side = vector(to, geometry.side);
  const auto all_regions = to.CreateVector(regions);
  return wire::CreateGeometry(to, geometry.id.value, geometry.rank.value, side, all_regions, to.CreateVector(tensors));
}
Offset<wire::Ping> write(FlatBufferBuilder& to, const Ping& ping) { return wire::CreatePing(to, ping.answer); }
Offset<wire::HelloFirst> write(FlatBufferBuilder& to, const HelloFirst&) { return wire::CreateHelloFirst(to); }
Offset<wire::Refused> write(FlatBufferBuilder& to, const Refused& refused) {
  const auto reason = to.CreateString(cut_reason(refused.reason));
  return wire::CreateRefused(to, static_cast<std::uint8_t>(refused.code), reason);
}

template <class Table>
constexpr wire::Told kind(Offset<Table> /*of*/) {
  return wire::ToldTraits<Table>::enum_value;
}

// ---- reading: the verifier has been over these bytes, so pointers and lengths are good, but no number is ----

Expected<Rank> read_rank(std::int32_t from) {
  if (from < 0 || from >= kMaxRanks) return fail(Code::out_of_range, "rank {} is not in [0, {})", from, kMaxRanks);
  return Rank(from);
}

Expected<std::string> read_name(const flatbuffers::String& from, const char* what) {
  if (from.size() > kMaxName) return fail(Code::exhausted, "{} of {} B: at most {} are read", what, from.size(), kMaxName);
  return from.str();
}

std::vector<std::uint8_t> read_octets(const flatbuffers::Vector<std::uint8_t>& from) {
  return {from.data(), from.data() + from.size()};
}

using What = decltype(Told::what);

Expected<What> read(const wire::Hello& from) {
  const auto rank = read_rank(from.rank());
  if (!rank) return tl::unexpected(rank.error());
  auto name = read_name(*from.name(), "a name"), transport = read_name(*from.transport(), "an address");
  if (!name) return tl::unexpected(name.error());
  if (!transport) return tl::unexpected(transport.error());
  return Hello{from.incarnation(), from.capabilities(), *rank, std::move(*name), std::move(*transport)};
}

Expected<What> read(const wire::Welcome& from) {
  const auto rank = read_rank(from.rank());
  if (!rank) return tl::unexpected(rank.error());
  auto name = read_name(*from.name(), "a name");
  if (!name) return tl::unexpected(name.error());
  return Welcome{from.incarnation(), from.capabilities(), *rank, std::move(*name), read_octets(*from.side())};
}

Expected<std::vector<RegionKey>> read_regions(const wire::Geometry& from) {
  if (from.regions()->size() > kMaxRegions)
    return fail(Code::exhausted, "{} regions: at most {} are read", from.regions()->size(), kMaxRegions);
  std::vector<RegionKey> out;
  for (const wire::RegionKey* region : *from.regions()) {
    if (region->length() < 0) return fail(Code::out_of_range, "a region of {} B", region->length());
    if (region->key()->size() > kMaxKeyBytes)
      return fail(Code::exhausted, "a region's key of {} B: at most {} are read", region->key()->size(), kMaxKeyBytes);
    const auto key = std::as_bytes(std::span(region->key()->data(), region->key()->size()));
    out.push_back({Bytes(region->length()), {key.begin(), key.end()}});
  }
  return out;
}

Expected<std::vector<PlacedTensor>> read_tensors(const wire::Geometry& from) {
  if (from.tensors()->size() > kMaxTensors)
    return fail(Code::exhausted, "{} tensors: at most {} are read", from.tensors()->size(), kMaxTensors);
  std::size_t left = kMaxTensorParts;
  std::vector<PlacedTensor> out;
  for (const wire::Tensor* tensor : *from.tensors()) {
    PlacedTensor read{tensor->group(), LayerId(tensor->layer()), {}};
    if (tensor->parts()->size() > left)
      return fail(Code::exhausted, "tensors in over {} parts: no more are read", kMaxTensorParts);
    left -= tensor->parts()->size();
    for (std::uint32_t i = 0; i < tensor->parts()->size(); ++i) {
      const auto part = flat_copy<wire::Part>(tensor->parts()->Data() + i * sizeof(wire::Part));
      read.parts.push_back({Bytes(part.begin()), Bytes(part.length()), part.region(), Bytes(part.region_offset())});
    }
    out.push_back(std::move(read));
  }
  return out;
}

Expected<What> read(const wire::Geometry& from) {
  const auto rank = read_rank(from.rank());
  if (!rank) return tl::unexpected(rank.error());
  auto regions = read_regions(from);
  if (!regions) return tl::unexpected(regions.error());
  auto tensors = read_tensors(from);
  if (!tensors) return tl::unexpected(tensors.error());
  return Geometry{GeometryId(from.id()), *rank, read_octets(*from.side()), std::move(*regions), std::move(*tensors)};
}

Expected<What> read(const wire::Refused& from) {
  if (from.code() > static_cast<std::uint8_t>(Code::io)) return fail(Code::unsupported, "code {} is unknown", from.code());
  if (from.reason()->size() > kMaxReason)
    return fail(Code::exhausted, "a reason of {} B: at most {} are read", from.reason()->size(), kMaxReason);
  return Refused{static_cast<Code>(from.code()), from.reason()->str()};
}

Expected<What> read(const wire::Connection& from) {
  switch (from.told_type()) {
    case wire::Told::Hello: return read(*from.told_as_Hello());
    case wire::Told::Welcome: return read(*from.told_as_Welcome());
    case wire::Told::Geometry: return read(*from.told_as_Geometry());
    case wire::Told::Ping: return Ping{from.told_as_Ping()->answer()};
    case wire::Told::HelloFirst: return HelloFirst{};
    case wire::Told::Refused: return read(*from.told_as_Refused());
    case wire::Told::NONE: break;
  }
  return fail(Code::unsupported, "kind {}: this kvloom knows 1 to {}", static_cast<int>(from.told_type()),
              static_cast<int>(wire::Told::MAX));
}

constexpr FlatFormat kFormat = {"connection message", "KVLC", kSessionVersion,
                                kMaxConnectionBytes,  4,      3 + kMaxRegions + kMaxTensors};

}  // namespace

// ---- tokens ----

ConnectionToken draw_token() {
  std::random_device device;
  const auto word = [&] { return (std::uint64_t{device()} << 32) | device(); };
  return {word(), word()};
}

std::vector<std::byte> bytes_of(const ConnectionToken& token) {
  std::vector<std::byte> out(sizeof token);
  std::memcpy(out.data(), &token, sizeof token);
  return out;
}

std::optional<ConnectionToken> token_of(std::span<const std::byte> hello) {
  ConnectionToken out;
  if (hello.size() != sizeof out) return std::nullopt;
  std::memcpy(&out, hello.data(), sizeof out);
  return out;
}

// ---- bytes ----

const char* kind_of(const Told& told) {
  constexpr const char* kKinds[] = {"hello", "welcome", "geometry", "ping", "hello first", "refused"};
  return kKinds[told.what.index()];
}

std::vector<std::uint8_t> encode_told(const Told& told) {
  return std::visit(
      [&](const auto& what) {
        FlatBufferBuilder builder;
        const auto content = write(builder, what);
        const auto root =
            wire::CreateConnection(builder, kSessionVersion, told.token.high, told.token.low, kind(content), content.Union());
        builder.Finish(root, kFormat.identifier);
        return flat_bytes(builder);
      },
      told.what);
}

Expected<Told> decode_told(std::span<const std::uint8_t> bytes) {
  const auto root = FlatRoot<wire::Connection>::make(bytes, kFormat);
  if (!root) return tl::unexpected(root.error());
  auto what = read(**root);
  if (!what) return fail(what.error().code, "a connection message: {}", what.error().message);
  return Told{{(*root)->token_high(), (*root)->token_low()}, std::move(*what)};
}

Expected<Said> decode_said(std::span<const std::uint8_t> bytes) {
  constexpr std::size_t kLeast = 2 * sizeof(flatbuffers::uoffset_t);
  if (bytes.size() >= kLeast && flatbuffers::BufferHasIdentifier(bytes.data(), kFormat.identifier)) {
    auto told = decode_told(bytes);
    if (!told) return tl::unexpected(told.error());
    return std::move(*told);
  }
  auto message = decode_message(bytes);
  if (!message) return tl::unexpected(message.error());
  return std::move(*message);
}

}  // namespace kvloom
