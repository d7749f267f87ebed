#include "kvloom/plan/wire.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cstring>

#include "kvloom/plan/compile.h"
#include "kvloom/plan/plan_generated.h"
#include "kvloom/plan/text.h"
#include "tests/shapes/shapes.h"

namespace kvloom {
namespace {

using shapes::holds;
using shapes::says;
using shapes::side;
using WireBytes = std::vector<std::uint8_t>;

Expected<void> check_plan_wire(const Plan& plan) {
  const WireBytes bytes = encode(plan);
  const auto read = decode(bytes);
  if (!read) return tl::unexpected(read.error());
  if (to_string(*read) != to_string(plan) || encode(*read) != bytes) return fail(Code::parse, "another plan came back");
  return {};
}

// Other bytes than `plan`'s: an error, or the same plan.
testing::AssertionResult is_never_another(const Plan& plan, std::span<const std::uint8_t> bytes) {
  const auto read = decode(bytes);
  if (!read) return testing::AssertionResult(!read.error().message.empty()) << "an error without words";
  return testing::AssertionResult(digest(*read) == digest(plan)) << "another plan came back";
}

Plan small_plan() { return compile(side(shapes::drafted(), "cp=2:layers"), side(shapes::drafted(), "tp=2,draft:none")).value(); }

// GLM-5.2: 78 layers of MLA with DSA, an indexer on every fourth layer and on the first three, and one draft layer.
CacheShape glm() {
  std::vector<LayerId> indexers = {LayerId(0), LayerId(1), LayerId(2)};
  for (std::int32_t layer = 6; layer <= 74; layer += 4) indexers.emplace_back(layer);
  return shapes::made("glm-5.2", 78,
                      {{"latent", GroupKind::paged, shapes::layer_ids(0, 78), 1, {{"latent", 656, 1}}, {}, {}},
                       {"index_k", GroupKind::paged, indexers, 1, {{"keys", 128, 1}, {"scales", 4, 4}}, {}, {}},
                       {"draft", GroupKind::paged, shapes::layer_ids(78, 79), 1, {{"latent", 656, 1}}, {}, {}}});
}

TEST(PlanWire, OfEightToFourGlmRanksIsUnder4KiB) {
  const auto plan = compile(side(glm(), "cp=8:layers", 64), side(glm(), "dcp=4,draft:replicated", 64));
  EXPECT_TRUE(holds(check_plan_wire(*plan)));
  const std::size_t size = encode(*plan).size();
  testing::Test::RecordProperty("bytes", static_cast<int>(size));
  EXPECT_LT(size, 4096);
}

TEST(PlanWire, ReadsBackForEveryListedPair) {
  std::int64_t n = 0;
  for (const CacheShape& shape : shapes::all())
    for (const std::string& from : shapes::words()) {
      const std::string& to = shapes::words()[static_cast<std::size_t>(n * 11) % shapes::words().size()];
      ++n;
      const auto plan = compile(side(shape, from, n % 2 == 0 ? 4 : 6), side(shape, to, n % 5 < 3 ? 4 : 2), 1 + n * 7 % 40);
      ASSERT_TRUE(plan) << plan.error().message;
      ASSERT_TRUE(holds(check_plan_wire(*plan))) << from << " to " << to;
    }
}

TEST(PlanWire, KeepsLayoutsThatNoWordSays) {
  Side source = side(shapes::gqa(2), "tp=2"), target = side(shapes::gqa(2), "tp=1");
  const GroupSide& group = source.groups().front();
  std::vector<PlaneLayout> planes = group.layout.planes();
  planes.front().offset += group.layout.page_stride();
  ASSERT_TRUE(source.set_layout("kv", PageLayout::planes(1, 4, group.layout.page_stride(), planes).value()));
  EXPECT_TRUE(holds(check_plan_wire(compile(source, target).value())));
}

TEST(PlanWire, RefusesEveryTruncation) {
  const WireBytes bytes = encode(small_plan());
  constexpr std::size_t kPadding = 3;  // at the end, read by nobody
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_TRUE(size + kPadding >= bytes.size() || !decode(std::span(bytes).first(size))) << size;
    EXPECT_TRUE(is_never_another(small_plan(), std::span(bytes).first(size))) << size;
  }
}

TEST(PlanWire, NeverMakesAnotherPlanOfAFlippedBit) {
  const Plan plan = small_plan();
  const WireBytes bytes = encode(plan);
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    WireBytes flipped = bytes;
    flipped[bit / 8] ^= static_cast<std::uint8_t>(1U << bit % 8);
    ASSERT_TRUE(is_never_another(plan, flipped)) << "bit " << bit;
  }
}

RC_GTEST_PROP(PlanWire, NeverMakesAnotherPlanOfOverwrittenBytes, ()) {
  static const Plan plan = small_plan();
  WireBytes bytes = encode(plan);
  for (int n = *rc::gen::inRange(1, 5); n > 0; --n)
    bytes[*rc::gen::inRange<std::size_t>(0, bytes.size())] = *rc::gen::arbitrary<std::uint8_t>();
  RC_ASSERT(static_cast<bool>(is_never_another(plan, bytes)));
}

RC_GTEST_PROP(PlanWire, RefusesNoise, (const WireBytes& noise)) { RC_ASSERT(!decode(noise)); }

TEST(PlanWire, ReadsFromAnyAddress) {
  const Plan plan = small_plan();
  const WireBytes bytes = encode(plan);
  for (std::size_t shift = 1; shift < 8; ++shift) {
    WireBytes moved(bytes.size() + shift);
    std::copy(bytes.begin(), bytes.end(), moved.begin() + static_cast<std::ptrdiff_t>(shift));
    const auto read = decode(std::span(moved).subspan(shift));
    ASSERT_TRUE(read) << read.error().message;
  }
}

// ---- newer writers ----

template <class T>
T get(const WireBytes& bytes, std::size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

template <class T>
void put(WireBytes& bytes, std::size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
}

// The root gets a vtable of one more slot, at the end of the bytes; the unknown field is the inline bytes of another.
// Source: https://flatbuffers.dev/internals: a table begins with the signed distance back to its vtable (sizes of both, then
// offsets).
WireBytes with_newer_field(WireBytes bytes) {
  const auto root = get<std::uint32_t>(bytes, 0);
  const auto vtable = static_cast<std::size_t>(static_cast<std::int64_t>(root) - get<std::int32_t>(bytes, root));
  const auto size = get<std::uint16_t>(bytes, vtable);
  bytes.resize((bytes.size() + 7) / 8 * 8);
  const std::size_t made = bytes.size();
  bytes.insert(bytes.end(), bytes.begin() + static_cast<std::ptrdiff_t>(vtable),
               bytes.begin() + static_cast<std::ptrdiff_t>(vtable + size));
  bytes.resize(made + size + 8);
  put<std::uint16_t>(bytes, made, static_cast<std::uint16_t>(size + 2));
  put<std::uint16_t>(bytes, made + size, get<std::uint16_t>(bytes, made + 4));
  put<std::int32_t>(bytes, root, static_cast<std::int32_t>(static_cast<std::int64_t>(root) - static_cast<std::int64_t>(made)));
  return bytes;
}

TEST(PlanWire, PassesOverFieldsOfNewerWriters) {
  const Plan plan = small_plan();
  const auto read = decode(with_newer_field(encode(plan)));
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(to_string(*read), to_string(plan));
}

// ---- the words of errors ----

TEST(PlanWire, SaysWhatIsWrong) {
  const Plan plan = small_plan();
  const WireBytes bytes = encode(plan);
  EXPECT_TRUE(says(decode({}), "0 B that do not begin as a plan does ('KVLP')"));
  EXPECT_TRUE(says(decode(std::span(bytes).first(40)), "a plan of 40 B that is damaged or cut short"));
  EXPECT_TRUE(says(decode(WireBytes(kMaxWireBytes + 1)), "at most 1048576 are read"));
  WireBytes newer = bytes, other = bytes;
  wire::GetMutablePlan(newer.data())->mutate_version(2);
  EXPECT_TRUE(says(decode(newer), "a plan of version 2: this kvloom reads version 1"));
  wire::GetMutablePlan(other.data())->mutable_digest()->mutate_low(7);
  EXPECT_TRUE(says(decode(other), "0000000000000007, but its sides make " + digest(plan)));
}

}  // namespace
}  // namespace kvloom
