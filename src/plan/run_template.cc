#include "kvloom/plan/run_template.h"

#include <algorithm>
#include <array>

namespace kvloom {
namespace {

struct Dim {
  std::int64_t n, source, target;  // extent; bytes from one to the next on each side
};

// Up to four dimensions over `bytes` contiguous bytes.
class Box {
 public:
  Box(std::int64_t source, std::int64_t target, std::int64_t bytes) : source_(source), target_(target), bytes_(bytes) {}

  void add(std::int64_t n, std::int64_t source, std::int64_t target) {
    if (n > 1) dims_[size_++] = {n, source, target};
  }

  void join() {
    for (bool changed = true; changed;) {
      changed = false;
      for (std::size_t i = 0; i < size_ && !changed; ++i) changed = swallow(i) || continue_other(i);
    }
  }

  // The longest dimension counts; the others, three at most, are walked.
  void emit(std::vector<Run>& out) {
    Dim counted{1, 0, 0};
    if (size_ > 0) {
      const auto longest =
          std::max_element(dims_.begin(), dims_.begin() + size_, [](const Dim& a, const Dim& b) { return a.n < b.n; });
      counted = *longest;
      remove(static_cast<std::size_t>(longest - dims_.begin()));
    }
    for (std::size_t i = size_; i < 3; ++i) dims_[i] = {1, 0, 0};
    const auto [a, b, c] = std::array{dims_[0], dims_[1], dims_[2]};
    for (std::int64_t z = 0; z < c.n; ++z)
      for (std::int64_t y = 0; y < b.n; ++y)
        for (std::int64_t x = 0; x < a.n; ++x)
          put(out, x * a.source + y * b.source + z * c.source, x * a.target + y * b.target + z * c.target, counted);
  }

 private:
  // Elements that touch on both sides are one longer element.
  bool swallow(std::size_t i) {
    if (dims_[i].source != bytes_ || dims_[i].target != bytes_) return false;
    bytes_ *= dims_[i].n;
    remove(i);
    return true;
  }
  // One dimension that goes on where another ends, on both sides, is one longer dimension.
  bool continue_other(std::size_t i) {
    for (std::size_t j = 0; j < size_; ++j) {
      if (j == i || dims_[j].source != dims_[i].source * dims_[i].n || dims_[j].target != dims_[i].target * dims_[i].n) continue;
      dims_[i].n *= dims_[j].n;
      remove(j);
      return true;
    }
    return false;
  }
  void remove(std::size_t i) {
    std::copy(dims_.begin() + static_cast<std::ptrdiff_t>(i) + 1, dims_.begin() + static_cast<std::ptrdiff_t>(size_),
              dims_.begin() + static_cast<std::ptrdiff_t>(i));
    --size_;
  }
  void put(std::vector<Run>& out, std::int64_t source, std::int64_t target, const Dim& counted) const {
    out.push_back({Bytes(source_ + source), Bytes(target_ + target), Bytes(bytes_), counted.n,
                   Bytes(counted.n > 1 ? counted.source : 0), Bytes(counted.n > 1 ? counted.target : 0)});
  }

  std::int64_t source_, target_, bytes_;
  std::array<Dim, 4> dims_{};
  std::size_t size_ = 0;
};

// Plane i of both sides with `bytes` from its neighbours joined in.
void expand_plane(const PlaneLayout& from, const PlaneLayout& to, std::int64_t bytes, const HeadSlice& heads,
                  const TokenPiece& piece, std::vector<Run>& out) {
  const bool strided = from.content_stride != 0 || to.content_stride != 0;
  const std::int64_t element = from.element_bytes;
  Box box(from.offset + piece.source_slot * from.token_stride + heads.source_first * from.head_stride,
          to.offset + piece.target_slot * to.token_stride + heads.target_first * to.head_stride, strided ? element : bytes);
  if (strided)
    box.add(bytes / element, from.content_stride != 0 ? from.content_stride : element,
            to.content_stride != 0 ? to.content_stride : element);
  box.add(piece.length, from.token_stride, to.token_stride);
  box.add(piece.count, piece.source_step * from.token_stride, piece.target_step * to.token_stride);
  box.add(heads.count, from.head_stride, to.head_stride);
  box.join();
  box.emit(out);
}

// True where `next` begins at the end of the `bytes` that begin at `plane`, slot by slot and head by head.
bool continues(const PlaneLayout& plane, std::int64_t bytes, const PlaneLayout& next) {
  return next.offset == plane.offset + bytes && next.token_stride == plane.token_stride &&
         next.head_stride == plane.head_stride && plane.content_stride == 0 && next.content_stride == 0;
}

bool goes_on(const Run& a, const Run& b) {
  return a.count == b.count && a.source_step == b.source_step && a.target_step == b.target_step &&
         b.source_offset == a.source_offset + a.bytes && b.target_offset == a.target_offset + a.bytes;
}

// Joins runs of one page that touch on both sides: whole planes that follow each other.
void join_runs(std::vector<Run>& out, std::size_t first) {
  std::sort(out.begin() + static_cast<std::ptrdiff_t>(first), out.end(),
            [](const Run& a, const Run& b) { return a.source_offset < b.source_offset; });
  std::size_t kept = first;
  for (std::size_t i = first + 1; i < out.size(); ++i) {
    if (goes_on(out[kept], out[i]))
      out[kept].bytes += out[i].bytes;
    else
      out[++kept] = out[i];
  }
  if (out.size() > first) out.resize(kept + 1);
  for (std::size_t i = first; i < out.size(); ++i) {
    Run& run = out[i];
    if (run.count > 1 && run.source_step == run.bytes && run.target_step == run.bytes)
      run = {run.source_offset, run.target_offset, run.bytes * run.count, 1, Bytes(0), Bytes(0)};
  }
}

}  // namespace

void expand(const PageLayout& source, const PageLayout& target, const HeadSlice& heads, const TokenPiece& piece,
            std::vector<Run>& out) {
  const std::size_t first = out.size();
  const auto &from = source.planes(), &to = target.planes();
  for (std::size_t i = 0; i < from.size();) {
    std::int64_t bytes = from[i].bytes;
    std::size_t next = i + 1;
    for (; next < from.size() && continues(from[i], bytes, from[next]) && continues(to[i], bytes, to[next]); ++next)
      bytes += from[next].bytes;
    expand_plane(from[i], to[i], bytes, heads, piece, out);
    i = next;
  }
  join_runs(out, first);
}

}  // namespace kvloom
