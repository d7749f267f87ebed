#include "kvloom/transport/shm/memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace kvloom::shm {

Fd::~Fd() {
  if (fd_ >= 0) close(fd_);
}

Mapping::~Mapping() {
  if (!memory_.empty()) munmap(memory_.data(), memory_.size());
}

const char* errno_text() { return strerrordesc_np(errno); }

Expected<SharedMemory> make_shared_memory(const char* name, Bytes length, Sharing sharing) {
  const auto size = static_cast<std::size_t>(length.value);
  SharedMemory out;
  out.fd = Fd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!out.fd) return fail(Code::exhausted, "memfd_create for {} bytes: {}", length.value, errno_text());
  if (ftruncate(out.fd.get(), length.value) != 0)
    return fail(Code::exhausted, "no shared memory of {} bytes: {}", length.value, errno_text());
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, out.fd.get(), 0);
  if (base == MAP_FAILED) return fail(Code::exhausted, "mapping {} bytes of shared memory: {}", length.value, errno_text());
  out.mapping = Mapping(base, size);
  madvise(base, size, MADV_HUGEPAGE);  // a wish: most hosts have shmem_enabled=never
  const int writes = sharing == Sharing::read_only ? F_SEAL_FUTURE_WRITE : 0;
  if (fcntl(out.fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | writes | F_SEAL_SEAL) != 0) {
    return fail(Code::io, "sealing a memfd: {}", errno_text());
  }
  return out;
}

Expected<Mapping> map_peer_memory(const Fd& fd, Bytes length, Sharing sharing) {
  if (length.value <= 0) return fail(Code::invalid_argument, "memory of {} bytes", length.value);
  // Nothing but an ordinary memfd: another file system could make us wait in a page fault, and huge pages that run out are a
  // SIGBUS.
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  struct statfs system = {};
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || fstatfs(fd.get(), &system) != 0 || system.f_type != TMPFS_MAGIC)
    return fail(Code::invalid_argument, "not a memfd that is sealed against shrinking");
  struct stat st = {};
  if (fstat(fd.get(), &st) != 0 || st.st_size < length.value) {
    return fail(Code::invalid_argument, "a memfd of {} bytes where {} were said", st.st_size, length.value);
  }
  if (sharing == Sharing::to_pin && st.st_blocks * 512 < length.value)  // pinning would make the rest, at our expense
    return fail(Code::invalid_argument, "a memfd of which {} bytes exist, where {} are to be pinned", st.st_blocks * 512,
                length.value);
  const auto size = static_cast<std::size_t>(length.value);
  const int protection = sharing == Sharing::read_only ? PROT_READ : PROT_READ | PROT_WRITE;
  void* base = mmap(nullptr, size, protection, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) return fail(Code::exhausted, "mapping {} bytes of a peer: {}", length.value, errno_text());
  madvise(base, size, MADV_HUGEPAGE);
  return Mapping(base, size);
}

}  // namespace kvloom::shm
