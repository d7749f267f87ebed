#include "kvloom/transport/shm/cpu_device.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "kvloom/transport/shm/incoming.h"

namespace kvloom::shm {
namespace {

constexpr std::int64_t kPrefault = 1ll << 30;  // bytes of a region whose page table entries are made at once

class Memfd final : public LocalMemory {
 public:
  explicit Memfd(SharedMemory memory) : mapping_(std::move(memory.mapping)) {
    offer_.length = Bytes(static_cast<std::int64_t>(mapping_.memory().size()));
    offer_.descriptors.push_back(std::move(memory.fd));
  }
  std::span<std::byte> memory() const override { return mapping_.memory(); }
  const Offer* offer() const override { return &offer_; }

 private:
  Mapping mapping_;
  Offer offer_;
};

class Plain final : public LocalMemory {
 public:
  explicit Plain(std::span<std::byte> memory) : memory_(memory) {}
  std::span<std::byte> memory() const override { return memory_; }
  const Offer* offer() const override { return nullptr; }
  std::string why_not() const override { return "it is registered memory of its owner; shm writes read memory from allocate()"; }

 private:
  std::span<std::byte> memory_;
};

class PeerMemfd final : public PeerMemory {
 public:
  explicit PeerMemfd(Mapping mapping) : mapping_(std::move(mapping)) {}
  std::span<const std::byte> memory() const override { return mapping_.memory(); }

 private:
  Mapping mapping_;
};

class CrewQueue final : public CopyQueue {
 public:
  explicit CrewQueue(CopyCrew& crew) : crew_(crew) {}
  Expected<void> start(const CopyWork& work, std::int64_t begin, std::int64_t end) override {
    jobs_.clear();
    work.append_jobs(jobs_);
    if (end > begin) crew_.run(jobs_, begin, end);
    ++finished_;
    return {};
  }
  Expected<std::uint64_t> finished() override { return finished_; }
  Bytes room() const override { return Bytes(std::int64_t{1} << 62); }
  Bytes batch() const override { return Bytes(8 << 20); }  // half a millisecond of copying, so the threads meet seldom
  void drain() override {}

 private:
  CopyCrew& crew_;
  std::vector<CopyJob> jobs_;  // of a start
  std::uint64_t finished_ = 0;
};

}  // namespace

Abilities CpuDevice::abilities() const {
  return {.name = "shm",
          .can_fence_frozen_peer = true,
          .can_revoke = true,
          .needs_target_progress = true,
          .source_must_be_allocated = true,
          .crosses_processes = true,
          .crosses_hosts = false,
          .max_notice_bytes = kMostNotice};
}

// `kvloom bench --only copy`, 1 thread, Xeon of 2023 (2 cores): shm push of pieces of 256 B to 36,864 B, and empty writes.
Cost CpuDevice::cost() const { return {.per_post = 250, .per_run = 45, .per_piece = 130, .per_byte = 0.098}; }

Expected<std::shared_ptr<LocalMemory>> CpuDevice::allocate(Bytes length) {
  auto memory = make_shared_memory("kvloom-region", length);
  if (!memory) return tl::unexpected(memory.error());
  const auto span = memory->mapping.memory();
  if (madvise(span.data(), span.size(), MADV_POPULATE_WRITE) != 0 && errno == ENOMEM)
    return fail(Code::exhausted, "no {} bytes of shared memory", length.value);
  return std::make_shared<Memfd>(std::move(*memory));
}

Expected<std::shared_ptr<LocalMemory>> CpuDevice::lend(std::span<std::byte> memory) { return std::make_shared<Plain>(memory); }

Expected<std::unique_ptr<PeerMemory>> CpuDevice::map(Offer offer) {
  if (offer.descriptors.size() != 1 || !offer.words.empty())
    return fail(Code::parse, "{} descriptors and {} bytes of words, where one memfd should be", offer.descriptors.size(),
                offer.words.size());
  auto mapping = map_peer_memory(offer.descriptors.front(), offer.length);
  if (!mapping) return tl::unexpected(mapping.error());
  madvise(mapping->memory().data(), static_cast<std::size_t>(std::min(offer.length.value, kPrefault)), MADV_POPULATE_READ);
  return std::make_unique<PeerMemfd>(std::move(*mapping));
}

Expected<std::unique_ptr<CopyQueue>> CpuDevice::queue() { return std::make_unique<CrewQueue>(crew_); }

}  // namespace kvloom::shm
