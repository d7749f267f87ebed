// The laws between real processes, which are killed and frozen. The child is forked before any world or endpoint is made, so it
// inherits none.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <sstream>

#include "tests/conformance/conformance.h"

namespace kvloom {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kNoticed{2};  // how soon a death has to be known

bool readable(int fd, std::chrono::milliseconds within) {
  pollfd waiting{fd, POLLIN, 0};
  return poll(&waiting, 1, static_cast<int>(within.count())) == 1;
}

// Whole messages between parent and child.
class Wire {
 public:
  explicit Wire(int fd) : fd_(fd) {}
  Wire(Wire&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;
  Wire& operator=(Wire&&) = delete;
  ~Wire() {
    if (fd_ >= 0) close(fd_);
  }

  void send(std::span<const std::byte> message) const {
    EXPECT_EQ(::send(fd_, message.data(), message.size(), MSG_NOSIGNAL), static_cast<ssize_t>(message.size()));
  }
  void send(std::string_view text) const { send(bytes_of(text)); }
  bool has_message() const { return readable(fd_, std::chrono::milliseconds(0)); }

  // Empty if the other end is gone or says nothing in time.
  std::vector<std::byte> receive() const {
    std::vector<std::byte> message(4096);
    if (!readable(fd_, kTestDeadline)) return {};
    const ssize_t got = recv(fd_, message.data(), message.size(), 0);
    message.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
    return message;
  }
  std::string receive_text() const {
    const auto message = receive();
    return {reinterpret_cast<const char*>(message.data()), message.size()};
  }

 private:
  int fd_;
};

// A forked process that plays a role and exits with 0 if none of its expectations failed. Killed and reaped at the latest with
// this.
class Child {
 public:
  explicit Child(const std::function<void(const Wire&)>& role) : wire_(-1) {
    std::array<int, 2> ends{};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()), 0);
    pid_ = fork();
    if (pid_ == 0) {
      close(ends[0]);
      role(Wire(ends[1]));
      _exit(testing::Test::HasFailure() ? 1 : 0);
    }
    close(ends[1]);
    new (&wire_) Wire(ends[0]);
    pidfd_ = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0));
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    kill();
    close(pidfd_);
  }

  const Wire& wire() const { return wire_; }
  pid_t pid() const { return pid_; }

  // Its exit status; -1 if it does not end in time, -SIGNAL if it was killed.
  int wait() {
    if (reaped_) return status_;
    if (!readable(pidfd_, kTestDeadline)) return -1;
    int status = 0;
    waitpid(pid_, &status, 0);
    reaped_ = true;
    status_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    return status_;
  }
  void kill() {
    if (!reaped_) ::kill(pid_, SIGKILL);
    wait();
  }
  void freeze() const {
    ::kill(pid_, SIGSTOP);
    await_frozen();
  }
  void await_frozen() const {
    siginfo_t info = {};
    EXPECT_EQ(waitid(P_PID, static_cast<id_t>(pid_), &info, WSTOPPED | WNOWAIT), 0);
  }
  void thaw() const { ::kill(pid_, SIGCONT); }

 private:
  Wire wire_;
  pid_t pid_ = -1;
  int pidfd_ = -1;
  bool reaped_ = false;
  int status_ = 0;
};

// Waits for `done` as long as is fair for noticing a death.
bool drive_soon(Party& side, const std::function<bool()>& done) {
  const auto deadline = Clock::now() + kNoticed;
  while (!done()) {
    if (Clock::now() > deadline) return false;
    side.poll({.wait = std::chrono::milliseconds(50)});
  }
  return true;
}

Runs pages(std::int64_t count, std::int64_t bytes, std::uint64_t seed) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
  Runs runs;
  for (std::int64_t i = 0; i < count; ++i)
    runs.push_back({Bytes(i * bytes), Bytes(order[static_cast<std::size_t>(i)] * bytes), Bytes(bytes)});
  return runs;
}

constexpr std::int64_t kPage = 36'864;
constexpr std::int64_t kPages = 256;
constexpr Bytes kLength{kPage * kPages};

// The source: told an address, then a key. Its memory is filled from kTag's number, as the target can do again.
struct Source {
  Source(const ConformanceCase& c, const Wire& wire, std::string_view hello = "") : world(c.world()) {
    side.transport = world->endpoint(bytes_of(hello));
    const auto id = side.transport->connect(wire.receive_text());
    EXPECT_TRUE(id) << to_string(id.error());
    target = *id;
    from = *side.transport->allocate(kLength);
    world->put_random(from.memory(), kTag.value);
    EXPECT_TRUE(drive({&side}, [&] { return side.count<PeerUp>() > 0; }));
    remote = *side.transport->import_region(target, wire.receive());
  }
  PostId write(const Runs& runs) { return side.transport->write({from.id(), remote, kTag, runs}); }

  std::unique_ptr<ConformanceWorld> world;
  Party side;
  PeerId target;
  Region from;
  RemoteRegion remote;
};

struct Target {
  explicit Target(const ConformanceCase& c) : world(c.world()), memory(world->memory(kLength)) {
    side.transport = world->endpoint(bytes_of("target"));
    to = *side.transport->register_memory(memory->span());
  }
  // Lets the next source in.
  PeerId welcome(const Wire& wire) {
    const std::size_t before = side.count<PeerUp>();
    wire.send(side.transport->address());
    EXPECT_TRUE(drive({&side}, [&] { return side.count<PeerUp>() > before; }));
    const PeerId source = side.all<PeerUp>().back().peer;
    EXPECT_TRUE(side.transport->admit(source, kTag));
    wire.send(*side.transport->export_region(to.id()));
    return source;
  }
  std::vector<std::byte> after(const Runs& runs) const {
    std::vector<std::byte> from(memory->span().size());
    std::vector<std::byte> out(from.size());
    fill(from, kTag.value);
    copy_slowly(out, from, runs);
    return out;
  }
  std::vector<std::byte> landed() const { return world->get(memory->span()); }
  bool untouched() const {
    return std::ranges::all_of(landed(), [](std::byte b) { return b == std::byte{0}; });
  }
  bool stays(std::span<const std::byte> still) { return stands_still(*world, memory->span(), still, {&side}); }

  std::unique_ptr<ConformanceWorld> world;
  std::unique_ptr<ConformanceMemory> memory;
  Party side;
  Region to;
};

const std::function<bool()> kNever = [] { return false; };

TEST_P(ProcessConformance, EveryByteLandsInTheOtherProcess) {
  const ConformanceCase& c = GetParam();
  const auto runs = pages(kPages, kPage, 1);
  Child child([&](const Wire& wire) {
    Source source(c, wire, "prefill 0");
    const PostId post = source.write(runs);
    source.side.transport->notify(source.target, kTag, bytes_of("landed"));
    EXPECT_TRUE(drive({&source.side}, [&] { return source.side.count<Completed>() == 2; }));
    EXPECT_EQ(source.side.completed(post)->delivered, kLength) << source.side.text();
    wire.receive();
  });
  Target target(c);
  const PeerId peer = target.welcome(child.wire());
  ASSERT_TRUE(drive({&target.side}, [&] { return target.side.count<Notice>() > 0; }));
  EXPECT_TRUE(target.landed() == target.after(runs));
  EXPECT_EQ(target.side.all<PeerUp>()[0].hello, bytes_of("prefill 0"));
  child.wire().send("end");
  EXPECT_EQ(child.wait(), 0);
  ASSERT_TRUE(drive_soon(target.side, [&] { return target.side.count<PeerDown>() > 0; }));
  EXPECT_EQ(target.side.all<PeerDown>()[0].peer, peer);
}

TEST_P(ProcessConformance, ASourceKilledMidBatchIsNoticedAndNothingOfItLandsLater) {
  const ConformanceCase& c = GetParam();
  const auto runs = pages(kPages, kPage, 2);
  Child child([&](const Wire& wire) {
    Source source(c, wire);
    source.write(runs);
    source.side.transport->notify(source.target, kTag, bytes_of("landed"));
    drive({&source.side}, kNever);
  });
  Target target(c);
  target.welcome(child.wire());
  ASSERT_TRUE(drive({}, [&] {
    target.side.poll({.copy = Bytes(2 * kPage)});
    return !target.untouched();
  }));
  child.kill();
  ASSERT_TRUE(drive_soon(target.side, [&] { return target.side.count<PeerDown>() > 0 || target.side.count<Notice>() > 0; }));
  ASSERT_TRUE(drive_soon(target.side, [&] { return target.side.count<PeerDown>() > 0; }));
  if (target.side.count<Notice>() > 0) {
    EXPECT_TRUE(target.landed() == target.after(runs)) << "it had all been posted";
  }
  const auto still = target.landed();
  EXPECT_TRUE(target.stays(still));
}

TEST_P(ProcessConformance, ATargetKilledMidBatchIsNoticedAndNeverVouchesForMore) {
  const ConformanceCase& c = GetParam();
  const auto runs = pages(kPages, kPage, 3);
  Child child([&](const Wire& wire) {
    Target target(c);
    target.welcome(wire);
    EXPECT_TRUE(drive({}, [&] {
      target.side.poll({.copy = Bytes(2 * kPage)});
      return !target.untouched();
    }));
    wire.send("some landed");
    wire.receive();  // until killed
  });
  Source source(c, child.wire());
  const PostId post = source.write(runs);
  ASSERT_TRUE(drive({&source.side}, [&] { return child.wire().has_message(); }));
  EXPECT_EQ(child.wire().receive_text(), "some landed");
  EXPECT_EQ(source.side.completed(post), nullptr);
  child.kill();
  const PostId late = source.write(runs);
  ASSERT_TRUE(
      drive_soon(source.side, [&] { return source.side.completed(post) != nullptr && source.side.completed(late) != nullptr; }));
  EXPECT_FALSE(source.side.completed(post)->delivered);
  EXPECT_FALSE(source.side.completed(late)->delivered);
  ASSERT_TRUE(drive_soon(source.side, [&] { return source.side.count<PeerDown>() > 0; }));
  for (int i = 0; i < 20; ++i) source.write(runs);
  ASSERT_TRUE(drive_soon(source.side, [&] { return source.side.count<Completed>() == 22; }));
  for (const Completed& done : source.side.all<Completed>()) EXPECT_FALSE(done.delivered);
}

TEST_P(ProcessConformance, AFrozenSourceCanBeFencedOff) {
  const ConformanceCase& c = GetParam();
  if (!c.abilities.can_fence_frozen_peer) GTEST_SKIP() << "pages stay in quarantine";
  const auto runs = pages(kPages, kPage, 4);
  Child child([&](const Wire& wire) {
    Source source(c, wire);
    std::uint64_t round = 0;
    ASSERT_TRUE(drive({&source.side}, [&] {
      if (source.side.count<Completed>() == round) {
        source.world->put_random(source.from.memory().first(1 << 16), ++round);
        source.write(runs);
      }
      return source.side.count<PeerDown>() > 0;
    }));
    EXPECT_FALSE(source.side.all<Completed>().back().delivered);
  });
  Target target(c);
  const PeerId peer = target.welcome(child.wire());
  ASSERT_TRUE(drive({}, [&] {
    target.side.poll({.copy = Bytes(10 * kPage)});
    return !target.untouched();
  }));
  child.freeze();
  target.side.poll({.copy = Bytes(10 * kPage)});
  ASSERT_TRUE(target.side.transport->fence(peer));
  const auto still = target.landed();
  EXPECT_TRUE(target.stays(still));
  child.thaw();
  EXPECT_EQ(child.wait(), 0);
  EXPECT_TRUE(target.stays(still));
  ASSERT_TRUE(drive({&target.side}, [&] { return target.side.count<PeerDown>() > 0; }));
  EXPECT_EQ(target.side.count<PeerDown>(), 1u);
}

TEST_P(ProcessConformance, AFrozenSourceDoesNotHoldUpTheOthers) {
  const ConformanceCase& c = GetParam();
  const auto runs = pages(kPages, kPage, 5);
  const auto role = [&](const Wire& wire) {
    Source source(c, wire);
    wire.receive();
    source.write(runs);
    source.side.transport->notify(source.target, kTag, bytes_of("landed"));
    EXPECT_TRUE(drive({&source.side}, [&] { return source.side.count<Completed>() == 2; }));
    wire.receive();
  };
  Child frozen(role);
  Child running(role);
  Target target(c);
  target.welcome(frozen.wire());
  const PeerId peer = target.welcome(running.wire());
  frozen.freeze();
  running.wire().send("go");
  ASSERT_TRUE(drive({&target.side}, [&] { return target.side.count<Notice>() > 0; }));
  EXPECT_EQ(target.side.all<Notice>()[0].peer, peer);
  EXPECT_TRUE(target.landed() == target.after(runs));
}

TEST_P(ProcessConformance, AFrozenTargetThatWasGivenUpNeverTellsOfWhatItReadsLater) {
  const ConformanceCase& c = GetParam();
  const auto runs = pages(kPages, kPage, 6);
  Child child([&](const Wire& wire) {
    Target target(c);
    target.welcome(wire);
    raise(SIGSTOP);
    EXPECT_TRUE(drive({&target.side}, [&] { return target.side.count<PeerDown>() > 0; }));
    EXPECT_TRUE(target.side.count<Notice>() == 0);
  });
  Source source(c, child.wire());
  child.await_frozen();
  const PostId post = source.write(runs);
  source.side.transport->notify(source.target, kTag, bytes_of("landed"));
  for (int i = 0; i < 10; ++i) source.side.poll();
  EXPECT_EQ(source.side.completed(post), nullptr);
  ASSERT_TRUE(source.side.transport->fence(source.target));
  source.world->put_random(source.from.memory(), 99);  // used again
  child.thaw();
  EXPECT_EQ(child.wait(), 0);
  ASSERT_TRUE(drive_soon(source.side, [&] { return source.side.count<Completed>() == 2; }));
  EXPECT_FALSE(source.side.completed(post)->delivered);
}

TEST_P(ProcessConformance, ARestartedSourceIsANewPeer) {
  const ConformanceCase& c = GetParam();
  const auto runs = pages(kPages, kPage, 7);
  const auto role = [&](const Wire& wire) {
    Source source(c, wire, "prefill 0");
    source.write(runs);
    source.side.transport->notify(source.target, kTag, bytes_of("landed"));
    drive({&source.side}, [&] { return wire.has_message(); });
  };
  auto first = std::make_unique<Child>(role);
  Child second(role);
  Target target(c);
  const PeerId before = target.welcome(first->wire());
  first->kill();
  const PeerId after = target.welcome(second.wire());
  EXPECT_NE(before, after);
  const auto told = [&] {
    const auto notices = target.side.all<Notice>();
    return std::any_of(notices.begin(), notices.end(), [&](const Notice& n) { return n.peer == after; });
  };
  ASSERT_TRUE(drive({&target.side}, told));
  EXPECT_TRUE(target.landed() == target.after(runs));
  EXPECT_FALSE(target.side.transport->admit(before, Tag(1)));
  second.wire().send("end");
  EXPECT_EQ(second.wait(), 0);
}

TEST_P(ProcessConformance, ManySourcesFillOneTarget) {
  const ConformanceCase& c = GetParam();
  constexpr std::int64_t kSources = 6;
  const auto all = pages(kPages, kPage, 8);
  const auto share = [&](std::int64_t i) {
    return Runs(all.begin() + i * kPages / kSources, all.begin() + (i + 1) * kPages / kSources);
  };
  std::vector<std::unique_ptr<Child>> children;
  for (std::int64_t i = 0; i < kSources; ++i) {
    children.push_back(std::make_unique<Child>([&, i](const Wire& wire) {
      Source source(c, wire);
      const auto runs = share(i);
      source.write(runs);
      source.side.transport->notify(source.target, kTag, bytes_of("landed"));
      EXPECT_TRUE(drive({&source.side}, [&] { return source.side.count<Completed>() == 2; }));
      wire.receive();
    }));
  }
  Target target(c);
  for (const auto& child : children) target.welcome(child->wire());
  ASSERT_TRUE(drive({&target.side}, [&] { return target.side.count<Notice>() == kSources; }));
  EXPECT_TRUE(target.landed() == target.after(all));
  for (const auto& child : children) {
    child->wire().send("end");
    EXPECT_EQ(child->wait(), 0);
  }
}

std::string file_text(const char* path) {
  std::ostringstream out;
  out << std::ifstream(path).rdbuf();
  return out.str();
}

std::size_t entries(const char* folder) {
  const std::filesystem::directory_iterator all(folder);
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

TEST_P(ProcessConformance, ATargetAndASourceKilledLeaveNothingBehind) {
  const ConformanceCase& c = GetParam();
  const std::size_t shared = entries("/dev/shm");
  Child target([&](const Wire& wire) {
    Target t(c);
    wire.send(t.side.transport->address());
    t.welcome(wire);
    drive({&t.side}, kNever);
  });
  std::string name = target.wire().receive_text();
  name = name.substr(name.find(':') + 1);
  EXPECT_THAT(file_text("/proc/net/unix"), testing::HasSubstr(name));
  // A device's driver keeps descriptors of its own from the first use on.
  EXPECT_TRUE(Target(c).side.transport->allocate(Bytes(4096)));
  const std::size_t descriptors = entries("/proc/self/fd");
  {
    Source source(c, target.wire());
    source.write({});
    for (int i = 0; i < 10; ++i) source.side.poll();
    target.kill();
  }
  EXPECT_EQ(entries("/proc/self/fd"), descriptors);
  EXPECT_EQ(entries("/dev/shm"), shared);
  EXPECT_THAT(file_text("/proc/net/unix"), testing::Not(testing::HasSubstr(name)));
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1) << "a child is left";
}

}  // namespace
}  // namespace kvloom
