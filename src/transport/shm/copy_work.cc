#include "kvloom/transport/shm/copy_work.h"

namespace kvloom::shm {

void CopyWork::clear() {
  stretches_.clear();
  places_.clear();
}

void CopyWork::begin(std::byte* target, const std::byte* source, const Run& like) {
  if (!stretches_.empty()) {
    const CopyJob& last = stretches_.back().like;
    if (last.target == target && last.source == source && is_same_kind(last.run, like)) return;
    if (stretches_.back().count == 0) stretches_.pop_back();
  }
  stretches_.push_back({{target, source, like}, places_.size(), 0});
}

void CopyWork::append_jobs(std::vector<CopyJob>& out) const {
  for (const Stretch& stretch : stretches_)
    for (const RunPlace& place : places(stretch)) out.push_back(job_at(stretch, place));
}

}  // namespace kvloom::shm
