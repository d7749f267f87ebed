#include "kvloom/transport/copy.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "kvloom/transport/copy_kernels.h"

namespace kvloom {

namespace {

void copy_plain(std::span<const Piece> pieces) {
  for (const Piece& piece : pieces) std::memcpy(piece.to, piece.from, piece.bytes);
}

// Collects pieces on the stack, so that a kernel sees many at a time and can look ahead.
class PieceBuffer {
 public:
  explicit PieceBuffer(const CopyKernel& kernel) : kernel_(kernel) {}
  void add(Piece piece) {
    pieces_[size_++] = piece;
    if (size_ == pieces_.size()) flush();
  }
  void flush() {
    if (size_ != 0) kernel_.copy(std::span(pieces_).first(size_));
    size_ = 0;
  }

 private:
  const CopyKernel& kernel_;
  std::size_t size_ = 0;
  std::array<Piece, 128> pieces_;
};

// Bytes [begin, end) of one job's stream.
void add_job(PieceBuffer& out, const CopyJob& job, std::int64_t begin, std::int64_t end) {
  const std::int64_t bytes = job.run.bytes.value;
  std::int64_t piece = begin / bytes;
  std::int64_t skip = begin % bytes;
  std::byte* to = job.target + job.run.target_offset.value + piece * job.run.target_step.value;
  const std::byte* from = job.source + job.run.source_offset.value + piece * job.run.source_step.value;
  for (std::int64_t left = end - begin; left > 0;) {
    const std::int64_t take = std::min(bytes - skip, left);
    out.add({to + skip, from + skip, static_cast<std::size_t>(take)});
    left -= take;
    skip = 0;
    if (left > 0) {
      to += job.run.target_step.value;
      from += job.run.source_step.value;
    }
  }
}

}  // namespace

std::vector<CopyKernel> copy_kernels() {
  std::vector<CopyKernel> kernels{{"plain", &copy_plain}};
  for (const CopyKernel& kernel : isa_copy_kernels()) kernels.push_back(kernel);
  return kernels;
}

CopyKernel best_copy_kernel() { return copy_kernels().back(); }

void copy_range(const CopyKernel& kernel, std::span<const CopyJob> jobs, std::int64_t begin, std::int64_t end) {
  PieceBuffer out(kernel);
  for (const CopyJob& job : jobs) {
    if (end <= 0) break;
    const std::int64_t total = job.run.total().value;
    if (begin < total) add_job(out, job, std::max<std::int64_t>(begin, 0), std::min(end, total));
    begin -= total;
    end -= total;
  }
  out.flush();
}

}  // namespace kvloom
