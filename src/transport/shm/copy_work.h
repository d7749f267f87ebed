// copy_work.h: what one start of a copy queue copies: runs in order, those that differ in their offsets alone said once.  Stage: carry.
// Pages of a plan are such runs by the thousands: here each is 16 bytes, where a job of its own is 72.
// Law (copy_work_test.cc): jobs() are the runs that were added, in their order.  Owner and thread: whoever fills it.
#pragma once

#include <span>
#include <vector>

#include "kvloom/transport/copy.h"

namespace kvloom::shm {

struct RunPlace {
  std::int64_t source = 0, target = 0;  // offsets, bytes
};

// places[first, first + count) of runs like this one.
struct Stretch {
  CopyJob like;  // its offsets say nothing
  std::size_t first = 0, count = 0;
};

class CopyWork {
 public:
  bool empty() const { return places_.empty(); }
  std::size_t runs() const { return places_.size(); }
  std::span<const Stretch> stretches() const { return stretches_; }
  std::span<const RunPlace> places(const Stretch& stretch) const {
    return std::span(places_).subspan(stretch.first, stretch.count);
  }

  void reserve(std::size_t runs) { places_.reserve(runs); }
  void clear();

  // Runs that are added from now on are of this kind, between these two places.
  void begin(std::byte* target, const std::byte* source, const Run& like);
  // @pre begin
  void add(Bytes source_offset, Bytes target_offset) {
    places_.push_back({source_offset.value, target_offset.value});
    ++stretches_.back().count;
  }

  // Appends them one by one.
  void append_jobs(std::vector<CopyJob>& out) const;

 private:
  std::vector<Stretch> stretches_;
  std::vector<RunPlace> places_;
};

// Run `place` of the stretch.
inline CopyJob job_at(const Stretch& stretch, const RunPlace& place) {
  CopyJob job = stretch.like;
  job.run.source_offset = Bytes(place.source);
  job.run.target_offset = Bytes(place.target);
  return job;
}

}  // namespace kvloom::shm
