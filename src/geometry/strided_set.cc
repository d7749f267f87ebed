#include "kvloom/geometry/strided_set.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <numeric>

#include "kvloom/base/units.h"

namespace kvloom {
namespace {

// start + span of `count` things of `extent`, `stride` apart; nothing if it reaches kUnbounded.
std::optional<std::int64_t> last_end(std::int64_t start, std::int64_t extent, std::int64_t stride, std::int64_t count) {
  const Wide end = Wide(start) + Wide(count - 1) * stride + extent;
  if (end >= Wide(kUnbounded)) return std::nullopt;
  return static_cast<std::int64_t>(end);
}

std::string count_text(std::int64_t count) { return count == kUnbounded ? "inf" : std::to_string(count); }

}  // namespace

StridedSet::StridedSet(std::int64_t start, std::int64_t length, std::int64_t inner_stride, std::int64_t inner_count,
                       std::int64_t stride, std::int64_t count)
    : start_(start), length_(length), inner_stride_(inner_stride), inner_count_(inner_count), stride_(stride), count_(count) {
  canonicalise();
}

// Touching segments join, and a single block is flat. A block that goes on evenly in the next one stays nested: in the sets that it
// was cut from, the step to the next block differs from the step inside one.
void StridedSet::canonicalise() {
  if (length_ <= 0 || inner_count_ <= 0 || count_ <= 0) {
    *this = StridedSet();
    return;
  }
  if (inner_count_ > 1 && inner_stride_ == length_) {
    length_ *= inner_count_;
    inner_count_ = 1;
  }
  if (inner_count_ > 1 && count_ == 1) {
    stride_ = inner_stride_;
    count_ = inner_count_;
    inner_count_ = 1;
  }
  if (inner_count_ == 1 && count_ > 1 && stride_ == length_) {
    length_ = count_ == kUnbounded ? kUnbounded : length_ * count_;
    count_ = 1;
  }
  if (inner_count_ == 1) inner_stride_ = 0;
  if (count_ == 1) stride_ = 0;
}

StridedSet StridedSet::interval(std::int64_t begin, std::int64_t end) {
  if (end <= begin) return {};
  return {begin, end == kUnbounded ? kUnbounded : end - begin, 0, 1, 0, 1};
}

Expected<StridedSet> StridedSet::make(std::int64_t start, std::int64_t length, std::int64_t stride, std::int64_t count) {
  return make(start, length, 0, 1, stride, count);
}

Expected<StridedSet> StridedSet::make(std::int64_t start, std::int64_t length, std::int64_t inner_stride,
                                      std::int64_t inner_count, std::int64_t stride, std::int64_t count) {
  const auto refuse = [&](const char* why) {
    return fail(Code::invalid_argument, "strided set {}+{}/{}*{}/{}*{}: {}", start, length, inner_stride, inner_count, stride,
                count_text(count), why);
  };
  if (start < 0 || length < 0 || inner_count < 0 || count < 0) return refuse("numbers must not be negative");
  if (length == 0 || inner_count == 0 || count == 0) return StridedSet();
  if (length == kUnbounded) {
    if (inner_count != 1 || count != 1) return refuse("a segment without end can't repeat");
    return interval(start, kUnbounded);
  }
  if (inner_count == kUnbounded) return refuse("only the outer count may be unbounded");
  if (inner_count > 1 && inner_stride < length) return refuse("segments overlap: the inner stride is below the length");
  const auto block = last_end(0, length, inner_stride, inner_count);
  if (!block) return refuse("the last index does not fit 63 bits");
  if (count > 1 && stride < *block) return refuse("blocks overlap: the stride is below the block");
  if (!last_end(start, *block, stride, count == kUnbounded ? 2 : count)) return refuse("the last index does not fit 63 bits");
  return StridedSet(start, length, inner_stride, inner_count, stride, count);
}

std::int64_t StridedSet::end() const {
  if (empty()) return 0;
  if (!bounded()) return kUnbounded;
  return start_ + (count_ - 1) * stride_ + (inner_count_ - 1) * inner_stride_ + length_;
}

std::int64_t StridedSet::count_below(std::int64_t index) const {
  if (empty() || index <= start_) return 0;
  std::int64_t offset = index - start_;
  if (interval()) return std::min(offset, length_);
  const std::int64_t block_size = inner_count_ * length_;
  std::int64_t below = 0;
  if (count_ > 1) {
    const std::int64_t block = offset / stride_;
    if (block >= count_) return count_ * block_size;
    below = block * block_size;
    offset -= block * stride_;
  }
  if (inner_count_ == 1) return below + std::min(offset, length_);
  const std::int64_t segment = offset / inner_stride_;
  if (segment >= inner_count_) return below + block_size;
  return below + segment * length_ + std::min(offset - segment * inner_stride_, length_);
}

bool StridedSet::contains(std::int64_t index) const {
  return index >= 0 && index < kUnbounded && count_below(index + 1) > count_below(index);
}

std::int64_t StridedSet::period() const {
  if (bounded()) return 0;
  return count_ == kUnbounded ? stride_ : 1;
}

// ---- text ----

std::string to_string(const StridedSet& set) {
  if (set.empty()) return "none";
  std::string text = fmt::format("{}+{}", set.start(), count_text(set.length()));
  if (!set.flat()) text += fmt::format("/{}*{}", set.inner_stride(), set.inner_count());
  if (set.count() > 1) text += fmt::format("/{}*{}", set.stride(), count_text(set.count()));
  return text;
}

std::string to_string(const std::vector<StridedSet>& sets) {
  if (sets.empty()) return "none";
  std::string text;
  for (const StridedSet& set : sets) text += (text.empty() ? "" : "|") + to_string(set);
  return text;
}

namespace {

// Reads a number or "inf" off the front of `text`.
std::optional<std::int64_t> take_number(std::string_view& text) {
  if (text.substr(0, 3) == "inf") {
    text.remove_prefix(3);
    return kUnbounded;
  }
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || value < 0) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return value;
}

bool take(std::string_view& text, char c) {
  if (text.empty() || text.front() != c) return false;
  text.remove_prefix(1);
  return true;
}

}  // namespace

Expected<StridedSet> StridedSet::parse(std::string_view text) {
  const std::string whole(text);
  const auto refuse = [&] {
    return fail(Code::parse, "'{}' is not a strided set: write start+length, start+length/stride*count, or none", whole);
  };
  if (text == "none") return StridedSet();
  std::vector<std::int64_t> numbers;  // start, length, then stride and count by pairs
  for (const char before : {'\0', '+', '/', '*', '/', '*'}) {
    if (text.empty()) break;
    if (before != '\0' && !take(text, before)) return refuse();
    const auto number = take_number(text);
    if (!number) return refuse();
    numbers.push_back(*number);
  }
  if (!text.empty() || numbers.size() % 2 != 0 || numbers.empty()) return refuse();
  if (numbers.size() == 2) return make(numbers[0], numbers[1], 0, 1);
  if (numbers.size() == 4) return make(numbers[0], numbers[1], numbers[2], numbers[3]);
  return make(numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5]);
}

// ---- clip ----

namespace {

StridedSet unchecked(std::int64_t start, std::int64_t length, std::int64_t inner_stride, std::int64_t inner_count,
                     std::int64_t stride, std::int64_t count) {
  auto made = StridedSet::make(start, length, inner_stride, inner_count, stride, count);
  return made ? *made : StridedSet();  // only from numbers that are known to fit
}

void keep(std::vector<StridedSet>& out, const StridedSet& set) {
  if (!set.empty()) out.push_back(set);
}

// One block, shifted to its place, as a set of its own.
StridedSet block_at(const StridedSet& set, std::int64_t block) {
  return unchecked(set.start() + block * set.stride(), set.length(), 0, 1, set.inner_stride(), set.inner_count());
}

// `blocks` blocks from `first`.
StridedSet blocks_of(const StridedSet& set, std::int64_t first, std::int64_t blocks) {
  return unchecked(set.start() + first * set.stride(), set.length(), set.inner_stride(), set.inner_count(), set.stride(), blocks);
}

void clip_into(const StridedSet& set, std::int64_t begin, std::int64_t end, std::vector<StridedSet>& out) {
  begin = std::max(begin, set.start());
  end = std::min(end, set.end());
  if (set.empty() || end <= begin) return;
  if (begin == set.start() && end == set.end()) return keep(out, set);
  if (set.interval()) return keep(out, StridedSet::interval(begin, end));
  const std::int64_t span = (set.inner_count() - 1) * set.inner_stride() + set.length();
  // Blocks [first, stop) are whole; the one before and the one after may be cut.
  const std::int64_t first = ceil_div(begin - set.start(), set.stride());
  const std::int64_t stop =
      end == kUnbounded ? set.count() : std::min(set.count(), floor_div(end - set.start() - span, set.stride()) + 1);
  if (first > 0) clip_into(block_at(set, first - 1), begin, end, out);
  if (stop > first) keep(out, blocks_of(set, first, stop == kUnbounded ? kUnbounded : stop - first));
  const std::int64_t tail = std::max(stop, first);
  if (tail < set.count() && end != kUnbounded) clip_into(block_at(set, tail), begin, end, out);
}

}  // namespace

std::vector<StridedSet> clip(const StridedSet& set, std::int64_t begin, std::int64_t end) {
  std::vector<StridedSet> out;
  clip_into(set, begin, end, out);
  return out;
}

// ---- intersect ----

namespace {

// The inverse of a modulo m by the extended Euclid.  @pre gcd(a, m) == 1, m > 0
std::int64_t inverse(std::int64_t a, std::int64_t m) {
  std::int64_t r0 = m, r1 = a % m, x0 = 0, x1 = 1;
  while (r1 > 1) {
    const std::int64_t q = r0 / r1;
    r0 -= q * r1;
    x0 -= q * x1;
    std::swap(r0, r1);
    std::swap(x0, x1);
  }
  return m == 1 ? 0 : floor_mod(x1, m);
}

// Two flat families with gaps, a segment i of `a` and a segment j of `b` at distance delta = start(j) - start(i).
// delta takes the values that are congruent to b.start - a.start modulo g, and i repeats with m2, j with m1.
struct Meeting {
  const StridedSet& a;
  const StridedSet& b;
  std::int64_t g, m1, m2, x;
  std::int64_t step;  // lcm of the strides; kUnbounded where it does not fit (then they meet once at most)

  Meeting(const StridedSet& a_, const StridedSet& b_) : a(a_), b(b_) {
    g = std::gcd(a.stride(), b.stride());
    m1 = a.stride() / g;
    m2 = b.stride() / g;
    x = inverse(m1, m2);
    step = checked_mul(m1, b.stride()).value_or(kUnbounded);
  }

  // The first segment of `a` (from 0) that meets some segment of b, real or before its first, at this distance.
  std::int64_t first_i(std::int64_t delta) const {
    const Wide wanted = Wide(b.start()) - a.start() - delta;  // a multiple of g
    const auto residue = static_cast<std::int64_t>((wanted / g) % m2);
    return static_cast<std::int64_t>(Wide(floor_mod(residue, m2)) * x % m2);
  }
  std::int64_t j_of(std::int64_t i, std::int64_t delta) const {
    return static_cast<std::int64_t>((Wide(a.start()) + Wide(i) * a.stride() + delta - b.start()) / b.stride());
  }
};

std::int64_t count_from(std::int64_t first, std::int64_t limit, std::int64_t step) {
  if (limit == kUnbounded) return kUnbounded;
  return first >= limit ? 0 : (limit - 1 - first) / step + 1;
}

// Distances delta, delta + b.stride, ... (`run` of them), which all share the progression of i; `overlap` indices of each segment.
// Where the first or last blocks lack some of their segments (b begins or ends inside), they are cut off as sets of their own.
void add_distances(const Meeting& m, std::int64_t delta, std::int64_t run, std::vector<StridedSet>& out) {
  const std::int64_t from = std::max<std::int64_t>(0, delta);
  const std::int64_t overlap = std::min(m.a.length(), delta + m.b.length()) - from;
  const std::int64_t i0 = m.first_i(delta);
  const std::int64_t j0 = m.j_of(i0, delta);
  const std::int64_t blocks = count_from(i0, m.a.count(), m.m2);
  if (blocks == 0) return;
  const auto emit = [&](std::int64_t k, std::int64_t q_from, std::int64_t q_to, std::int64_t count) {
    if (count <= 0 || q_to <= q_from) return;
    const Wide start = Wide(m.a.start()) + (Wide(i0) + Wide(k) * m.m2) * m.a.stride() + from + Wide(q_from) * m.b.stride();
    if (start >= Wide(kUnbounded)) return;
    const bool once = m.step == kUnbounded || start + m.step >= Wide(kUnbounded);
    keep(out,
         unchecked(static_cast<std::int64_t>(start), overlap, m.b.stride(), q_to - q_from, once ? 0 : m.step, once ? 1 : count));
  };
  // Segment q of block k is segment j0 + q + k * m1 of b: whole blocks are those for which all of them exist.
  const std::int64_t whole_from = std::max<std::int64_t>(0, ceil_div(-j0, m.m1));
  const std::int64_t some_from = std::max<std::int64_t>(0, ceil_div(-j0 - (run - 1), m.m1));
  std::int64_t whole_to = blocks, some_to = blocks;
  if (m.b.count() != kUnbounded) {
    whole_to = std::min(blocks, floor_div(m.b.count() - run - j0, m.m1) + 1);
    some_to = std::min(blocks, floor_div(m.b.count() - 1 - j0, m.m1) + 1);
  }
  const auto cut = [&](std::int64_t k) {
    const std::int64_t j = j0 + k * m.m1;
    emit(k, std::max<std::int64_t>(0, -j), m.b.count() == kUnbounded ? run : std::min(run, m.b.count() - j), 1);
  };
  std::int64_t k = some_from;
  for (; k < std::min(whole_from, some_to); ++k) cut(k);
  if (whole_to > k) {
    emit(k, 0, run, whole_to == kUnbounded ? kUnbounded : whole_to - k);
    k = whole_to;
  }
  if (k != kUnbounded)
    for (; k < some_to; ++k) cut(k);
}

// a's segments hold whole strides of b: one inner run of the fully covered distances per residue, and a clipped end on either side.
void meet_nested(const Meeting& m, std::vector<StridedSet>& out) {
  const std::int64_t origin = floor_mod(m.b.start() - m.a.start(), m.g);
  const std::int64_t residues = m.b.stride() / m.g;
  for (std::int64_t r = 0; r < residues; ++r) {
    const std::int64_t delta = origin + r * m.g;  // in [0, b.stride)
    const std::int64_t covered = floor_div(m.a.length() - m.b.length() - delta, m.b.stride()) + 1;
    const std::int64_t inside = std::max<std::int64_t>(0, covered);
    if (delta - m.b.stride() > -m.b.length()) add_distances(m, delta - m.b.stride(), 1, out);
    if (inside > 0) add_distances(m, delta, inside, out);
    for (std::int64_t d = delta + inside * m.b.stride(); d < m.a.length(); d += m.b.stride()) add_distances(m, d, 1, out);
  }
}

void meet_flat(const Meeting& m, std::vector<StridedSet>& out) {
  const std::int64_t origin = floor_mod(m.b.start() - m.a.start(), m.g);
  const std::int64_t first = origin + ceil_div(-m.b.length() + 1 - origin, m.g) * m.g;
  for (std::int64_t delta = first; delta < m.a.length(); delta += m.g) add_distances(m, delta, 1, out);
}

}  // namespace

std::vector<StridedSet> intersect(const StridedSet& a, const StridedSet& b) {
  if (a.empty() || b.empty()) return {};
  if (a.interval()) return clip(b, a.start(), a.end());
  if (b.interval()) return clip(a, b.start(), b.end());
  std::vector<StridedSet> out;
  if (a.count() == 2 || b.count() == 2) {  // zigzag: two intervals, whatever the other's period
    const StridedSet &two = a.count() == 2 ? a : b, &other = a.count() == 2 ? b : a;
    clip_into(other, two.start(), two.start() + two.length(), out);
    clip_into(other, two.start() + two.stride(), two.end(), out);
    return out;
  }
  if (a.length() >= b.stride())
    meet_nested(Meeting(a, b), out);
  else if (b.length() >= a.stride())
    meet_nested(Meeting(b, a), out);
  else
    meet_flat(Meeting(a, b), out);
  std::sort(out.begin(), out.end(), [](const StridedSet& x, const StridedSet& y) { return x.start() < y.start(); });
  return out;
}

}  // namespace kvloom
