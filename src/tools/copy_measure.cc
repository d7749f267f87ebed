#include "kvloom/tools/copy_measure.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <thread>

#include "kvloom/tools/plan_measure.h"
#include "kvloom/transport/copy_crew.h"
#include "kvloom/transport/shm/shm.h"

namespace kvloom {

namespace {

using Clock = std::chrono::steady_clock;
constexpr Tag kTag{1};
constexpr std::chrono::seconds kMeasurePatience{60};

// Pieces that fill the memory, from anywhere to anywhere.
std::vector<Run> scattered(Bytes memory, Bytes piece, std::uint64_t seed) {
  const std::int64_t count = memory / piece;
  std::vector<std::int64_t> from(static_cast<std::size_t>(count));
  std::iota(from.begin(), from.end(), 0);
  std::vector<std::int64_t> to = from;
  std::mt19937_64 random(seed);
  std::shuffle(from.begin(), from.end(), random);
  std::shuffle(to.begin(), to.end(), random);
  std::vector<Run> runs;
  runs.reserve(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) runs.push_back({piece * from[i], piece * to[i], piece});
  return runs;
}

// Private memory with every page there.
Expected<shm::Mapping> touched_memory(Bytes length) {
  const auto size = static_cast<std::size_t>(length.value);
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return fail(Code::exhausted, "no {} bytes of memory: {}", length.value, shm::errno_text());
  std::memset(base, 1, size);
  return shm::Mapping(base, size);
}

// One side of a connection: its transport and what the last poll told.
struct Talk {
  ShmTransport& transport;
  std::vector<Event> events;

  // Polls until an event of this kind comes.
  template <class T>
  Expected<T> await() {
    const auto deadline = Clock::now() + kMeasurePatience;
    while (Clock::now() < deadline) {
      for (auto event = events.begin(); event != events.end(); ++event) {
        if (const auto* down = std::get_if<PeerDown>(&*event)) return tl::unexpected(down->reason);
        if (auto* wanted = std::get_if<T>(&*event)) {
          T out = std::move(*wanted);
          events.erase(event);
          return out;
        }
      }
      transport.poll({.wait = std::chrono::seconds(1)}, events);
    }
    return fail(Code::deadline, "the other process said nothing for {} s", kMeasurePatience.count());
  }
};

std::vector<std::byte> bytes_of(std::int64_t value) {
  std::vector<std::byte> out(sizeof(value));
  std::memcpy(out.data(), &value, sizeof(value));
  return out;
}

// The forked source: per thread count one connection. A notice of 8 bytes asks for one push with that piece; the first notice is
// the region's key.
Expected<void> serve(const CopyOptions& options, std::span<const int> sockets) {
  auto transport = ShmTransport::make({});
  if (!transport) return tl::unexpected(transport.error());
  auto memory = (*transport)->allocate(options.memory);
  if (!memory) return tl::unexpected(memory.error());
  std::memset(memory->base(), 2, memory->memory().size());
  std::map<std::int64_t, std::vector<Run>> runs;
  for (const Bytes piece : options.pieces) runs.emplace(piece.value, scattered(options.memory, piece, options.seed));
  for (const int socket : sockets) {
    const auto peer = (*transport)->adopt(socket);
    if (!peer) return tl::unexpected(peer.error());
    if (auto ok = (*transport)->admit(*peer, kTag); !ok) return ok;
  }
  std::map<std::uint64_t, RemoteRegion> targets;
  std::vector<Event> events;
  for (;;) {
    (*transport)->poll({.wait = std::chrono::seconds(1)}, events);
    for (const Event& event : std::exchange(events, {})) {
      if (std::holds_alternative<PeerDown>(event)) return {};
      const auto* notice = std::get_if<Notice>(&event);
      if (notice == nullptr) continue;
      if (notice->payload.size() != sizeof(std::int64_t)) {
        const auto region = (*transport)->import_region(notice->peer, notice->payload);
        if (!region) return tl::unexpected(region.error());
        targets.emplace(notice->peer.value, *region);
        (*transport)->notify(notice->peer, kTag, {});  // ready
        continue;
      }
      std::int64_t piece = 0;
      std::memcpy(&piece, notice->payload.data(), sizeof(piece));
      (*transport)->write({memory->id(), targets.at(notice->peer.value), kTag, runs.at(piece)});
      (*transport)->notify(notice->peer, kTag, {});
    }
  }
}

class Bed final : public CopyBed {
 public:
  explicit Bed(const CopyOptions& options) : options_(options) {}
  ~Bed() override {
    push_.clear();  // hangs up
    if (child_ > 0) kill(child_, SIGKILL), waitpid(child_, nullptr, 0);
  }

  Expected<void> start();
  Expected<double> seconds(CopyWay way, Bytes piece, int threads) override;
  Bytes moved(CopyWay way, Bytes piece) const override {
    return way == CopyWay::contiguous ? options_.memory : piece * (options_.memory / piece);
  }

 private:
  // Towards the forked source, with so many copy threads.
  struct Push {
    std::unique_ptr<ShmTransport> transport;
    Region region;
    PeerId peer;
    std::unique_ptr<Talk> talk;
  };

  Expected<void> fork_source(std::vector<int>& ours);
  Expected<void> meet(int socket, int threads);
  Expected<double> push(Bytes piece, int threads);
  double copy(CopyWay way, Bytes piece, int threads);
  void contiguous(int threads) const;

  CopyOptions options_;
  pid_t child_ = -1;
  shm::Mapping from_;
  shm::Mapping to_;
  shm::SharedMemory shared_;
  shm::Mapping shared_view_;  // of shared_, read-only, as a peer has it
  std::map<std::int64_t, std::vector<Run>> runs_;
  std::map<int, Push> push_;
  std::map<std::pair<std::string_view, int>, std::unique_ptr<CopyCrew>> crews_;
};

Expected<void> Bed::fork_source(std::vector<int>& ours) {
  std::vector<int> theirs;
  for (std::size_t i = 0; i < options_.threads.size(); ++i) {
    std::array<int, 2> ends{};
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0)
      return fail(Code::io, "socketpair: {}", shm::errno_text());
    ours.push_back(ends[0]);
    theirs.push_back(ends[1]);
  }
  const pid_t parent = getpid();
  child_ = fork();
  if (child_ < 0) return fail(Code::exhausted, "fork: {}", shm::errno_text());
  if (child_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (const int fd : ours) close(fd);
    _exit(getppid() == parent && serve(options_, theirs) ? 0 : 1);
  }
  for (const int fd : theirs) close(fd);
  return {};
}

Expected<void> Bed::meet(int socket, int threads) {
  auto transport = ShmTransport::make({.copy_threads = threads});
  if (!transport) return tl::unexpected(transport.error());
  Push& push = push_[threads];
  push.transport = std::move(*transport);
  push.talk = std::make_unique<Talk>(Talk{*push.transport, {}});
  const auto peer = push.transport->adopt(socket);
  if (!peer) return tl::unexpected(peer.error());
  push.peer = *peer;
  if (auto up = push.talk->await<PeerUp>(); !up) return tl::unexpected(up.error());
  if (auto ok = push.transport->admit(push.peer, kTag); !ok) return ok;
  auto region = push.transport->register_memory(to_.memory());
  if (!region) return tl::unexpected(region.error());
  push.region = std::move(*region);
  push.transport->notify(push.peer, kTag, *push.transport->export_region(push.region.id()));
  if (auto ready = push.talk->await<Notice>(); !ready) return tl::unexpected(ready.error());
  return {};
}

Expected<void> Bed::start() {
  std::vector<int> sockets;
  if (auto ok = fork_source(sockets); !ok) return ok;
  auto from = touched_memory(options_.memory);
  auto to = touched_memory(options_.memory);
  auto shared = shm::make_shared_memory("kvloom-bench", options_.memory);
  if (!from) return tl::unexpected(from.error());
  if (!to) return tl::unexpected(to.error());
  if (!shared) return tl::unexpected(shared.error());
  from_ = std::move(*from);
  to_ = std::move(*to);
  shared_ = std::move(*shared);
  std::memset(shared_.mapping.memory().data(), 3, shared_.mapping.memory().size());
  auto view = shm::map_peer_memory(shared_.fd, options_.memory);
  if (!view) return tl::unexpected(view.error());
  shared_view_ = std::move(*view);
  for (const Bytes piece : options_.pieces) runs_.emplace(piece.value, scattered(options_.memory, piece, options_.seed));
  for (std::size_t i = 0; i < sockets.size(); ++i) {
    if (auto ok = meet(sockets[i], options_.threads[i]); !ok) return ok;
  }
  return {};
}

void Bed::contiguous(int threads) const {
  const std::size_t share = to_.memory().size() / static_cast<std::size_t>(threads);
  const auto part = [&](int i) {
    const std::size_t at = share * static_cast<std::size_t>(i);
    std::memcpy(to_.memory().data() + at, from_.memory().data() + at, share);
  };
  std::vector<std::thread> helpers;
  for (int i = 1; i < threads; ++i) helpers.emplace_back(part, i);
  part(0);
  for (std::thread& helper : helpers) helper.join();
}

double Bed::copy(CopyWay way, Bytes piece, int threads) {
  const CopyKernel kernel = way == CopyWay::memcpy_pieces ? copy_kernels().front() : best_copy_kernel();
  auto& crew = crews_[{kernel.name, threads}];
  if (crew == nullptr) crew = std::make_unique<CopyCrew>(kernel, threads);
  std::byte* const target = way == CopyWay::writes_peer ? shared_.mapping.memory().data() : to_.memory().data();
  const std::byte* const source = way == CopyWay::reads_peer ? shared_view_.memory().data() : from_.memory().data();
  const auto begin = Clock::now();
  if (way == CopyWay::contiguous) {
    contiguous(threads);
  } else {
    const std::span<const Run> runs = runs_.at(piece.value);
    std::vector<CopyJob> jobs;
    for (std::size_t at = 0; at < runs.size(); at += 4096) {  // as the shm transport does, by the batch
      jobs.clear();
      for (const Run& run : runs.subspan(at, std::min<std::size_t>(4096, runs.size() - at)))
        jobs.push_back({target, source, run});
      crew->run(jobs, 0, piece.value * static_cast<std::int64_t>(jobs.size()));
    }
  }
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

Expected<double> Bed::push(Bytes piece, int threads) {
  Push& push = push_.at(threads);
  const auto begin = Clock::now();
  push.transport->notify(push.peer, kTag, bytes_of(piece.value));
  const auto done = push.talk->await<Notice>();
  if (!done) return tl::unexpected(done.error());
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

Expected<double> Bed::seconds(CopyWay way, Bytes piece, int threads) {
  if (way == CopyWay::shm_push) return push(piece, threads);
  return copy(way, piece, threads);
}

constexpr std::array kPieceWays{CopyWay::memcpy_pieces, CopyWay::own_pieces, CopyWay::reads_peer, CopyWay::writes_peer,
                                CopyWay::shm_push};

}  // namespace

std::string_view to_string(CopyWay way) {
  switch (way) {
    case CopyWay::contiguous: return "memcpy, contiguous";
    case CopyWay::memcpy_pieces: return "memcpy, each piece";
    case CopyWay::own_pieces: return "copy loop, private memory";
    case CopyWay::reads_peer: return "copy loop, target reads the source's memory";
    case CopyWay::writes_peer: return "copy loop, source writes the target's memory";
    case CopyWay::shm_push: return "shm push, process to process";
  }
  return "?";
}

Expected<std::unique_ptr<CopyBed>> CopyBed::make(const CopyOptions& options) {
  auto bed = std::make_unique<Bed>(options);
  if (auto ok = bed->start(); !ok) return tl::unexpected(ok.error());
  return bed;
}

Expected<std::vector<CopyRow>> measure_copies(const CopyOptions& options) {
  auto bed = CopyBed::make(options);
  if (!bed) return tl::unexpected(bed.error());
  std::vector<CopyRow> rows;
  for (const int threads : options.threads) rows.push_back({CopyWay::contiguous, options.memory, threads, 0, 0});
  for (const Bytes piece : options.pieces) {
    for (const CopyWay way : kPieceWays) {
      for (const int threads : options.threads) rows.push_back({way, piece, threads, 0, 0});
    }
  }
  std::vector<std::vector<double>> seconds(rows.size());
  for (int round = 0; round <= options.repetitions; ++round) {  // the first one warms up
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const auto took = (*bed)->seconds(rows[i].way, rows[i].piece, rows[i].threads);
      if (!took) return tl::unexpected(took.error());
      if (round > 0) seconds[i].push_back(*took);
    }
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto bytes = static_cast<double>((*bed)->moved(rows[i].way, rows[i].piece).value);
    rows[i].gb_per_s = bytes / median(seconds[i]) / 1e9;
    rows[i].ratio = rows[i].gb_per_s / rows[0].gb_per_s;
  }
  return rows;
}

void print_copies(std::FILE* out, const std::vector<CopyRow>& rows) {
  fmt::print(out, "{:<46} {:>12} {:>7} {:>7} {:>6}\n", "way", "piece B", "threads", "GB/s", "ratio");
  for (const CopyRow& row : rows) {
    fmt::print(out, "{:<46} {:>12} {:>7} {:>7.2f} {:>6.2f}\n", to_string(row.way), row.piece.value, row.threads, row.gb_per_s,
               row.ratio);
  }
}

}  // namespace kvloom
