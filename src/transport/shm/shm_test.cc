#include "kvloom/transport/shm/shm.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>

#include "tests/conformance/conformance.h"

namespace kvloom {
namespace {

using testing::HasSubstr;

class ShmWorld : public ConformanceWorld {
 public:
  explicit ShmWorld(ShmOptions options) : options_(std::move(options)) { options_.listen = "*"; }
  std::unique_ptr<Transport> endpoint(std::vector<std::byte> hello) override {
    options_.hello = std::move(hello);
    return *ShmTransport::make(options_);
  }

 private:
  ShmOptions options_;
};

const Abilities kShm{.name = "shm",
                     .can_fence_frozen_peer = true,
                     .can_revoke = true,
                     .needs_target_progress = true,
                     .source_must_be_allocated = true,
                     .crosses_processes = true};

ConformanceCase shm_case(std::string name, ShmOptions options) {
  return {std::move(name), [options] { return std::make_unique<ShmWorld>(options); }, kShm};
}

const auto kCases =
    testing::Values(shm_case("one_thread", {}), shm_case("two_threads", {.copy_threads = 2}),
                    shm_case("plain_kernel_and_tiny_rings", {{.slots = 16, .answers = 16}, 1, copy_kernels().front()}));
INSTANTIATE_TEST_SUITE_P(Shm, TransportConformance, kCases, conformance_name);
INSTANTIATE_TEST_SUITE_P(Shm, ProcessConformance, kCases, conformance_name);

// --- options and addresses ------------------------------------------------------------------------------------------

std::string refusal(ShmOptions options) {
  const auto made = ShmTransport::make(std::move(options));
  return made ? "" : to_string(made.error());
}

TEST(Shm, RefusesOptionsThatCantBeRight) {
  EXPECT_THAT(refusal({{.slots = 100}}), HasSubstr("slots=100 answers=1024: both must be powers of two"));
  EXPECT_THAT(refusal({{.answers = 1ull << 40}}), HasSubstr("powers of two"));
  EXPECT_THAT(refusal({.copy_threads = 0}), HasSubstr("copy_threads=0 is not in 1..256"));
  EXPECT_THAT(refusal({{.hello = std::vector<std::byte>(1025)}}), HasSubstr("a hello of 1025 bytes; the most is 1024"));
  EXPECT_THAT(refusal({{.listen = std::string(200, 'x')}}), HasSubstr("has 200 characters; a name has 1 to 107"));
}

TEST(Shm, ANameBelongsToOneListener) {
  const auto first = ShmTransport::make({{.listen = "*"}});
  EXPECT_THAT(refusal({{.listen = (*first)->address().substr(4)}}), HasSubstr("Address already in use"));
}

TEST(Shm, AnEndpointWithoutANameCanOnlyConnect) {
  Party a{*ShmTransport::make({}), {}};
  Party b{*ShmTransport::make({{.listen = "*"}}), {}};
  EXPECT_EQ(a.transport->address(), "");
  ASSERT_TRUE(a.transport->connect(b.transport->address()));
  EXPECT_TRUE(drive({&a, &b}, [&] { return b.count<PeerUp>() == 1; }));
}

TEST(Shm, WritesFromRegisteredMemoryAreRefusedWithAWayOut) {
  Party a{*ShmTransport::make({}), {}};
  Party b{*ShmTransport::make({{.listen = "*"}}), {}};
  const PeerId peer = *a.transport->connect(b.transport->address());
  std::vector<std::byte> memory(100);
  const Region mine = *a.transport->register_memory(memory);
  const PostId post = a.transport->write({mine.id(), {peer, RegionId(1), Bytes(100)}, kTag, {}});
  ASSERT_TRUE(drive({&a, &b}, [&] { return a.completed(post) != nullptr; }));
  EXPECT_THAT(to_string(a.completed(post)->delivered.error()), HasSubstr("shm writes read memory from allocate()"));
}

TEST(Shm, ServesNoMorePeersThanItsOptionsSay) {
  Party b{*ShmTransport::make({{.listen = "*", .most_peers = 2}}), {}};
  std::vector<Party> sides(3);
  for (Party& side : sides) {
    side.transport = *ShmTransport::make({});
    ASSERT_TRUE(side.transport->connect(b.transport->address()));
  }
  ASSERT_TRUE(drive({&sides[0], &sides[1], &sides[2], &b}, [&] { return sides[2].count<PeerDown>() == 1; }));
  EXPECT_EQ(b.count<PeerUp>(), 2u);
}

// --- forked children over a socketpair ------------------------------------------------------------------------------

TEST(Shm, AForkedChildAdoptsItsEndOfASocketpair) {
  std::array<int, 2> ends{};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends.data()), 0);
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    auto transport = *ShmTransport::make({{.hello = bytes_of("child")}});
    Party side{nullptr, {}};
    const auto parent = transport->adopt(ends[1]);
    side.transport = std::move(transport);
    const bool ok = parent && drive({&side}, [&] { return side.count<Notice>() > 0 || side.count<PeerDown>() > 0; });
    side.transport->notify(*parent, Tag(2), bytes_of("pong"));
    const bool told = drive({&side}, [&] { return side.count<Completed>() > 0; });
    _exit(ok && told && side.all<Completed>()[0].delivered ? 0 : 1);
  }
  close(ends[1]);
  auto transport = *ShmTransport::make({{.hello = bytes_of("parent")}});
  const PeerId peer = *transport->adopt(ends[0]);
  Party side{std::move(transport), {}};
  ASSERT_TRUE(drive({&side}, [&] { return side.count<PeerUp>() > 0; }));
  EXPECT_EQ(side.all<PeerUp>()[0].hello, bytes_of("child"));
  ASSERT_TRUE(side.transport->admit(peer, Tag(2)));
  // The child admits nothing, so this fails, and its notice comes back when the parent is seen down: or never. It is the
  // connection that counts.
  side.transport->notify(peer, Tag(1), bytes_of("ping"));
  ASSERT_TRUE(drive({&side}, [&] { return side.count<Completed>() == 1; }));
  EXPECT_FALSE(side.all<Completed>()[0].delivered);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(drive({&side}, [&] { return side.count<PeerDown>() > 0; }));
}

TEST(Shm, ADeadPeerIsNoticedThoughAnotherProcessHoldsItsSocket) {
  std::array<int, 2> ends{};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends.data()), 0);
  const pid_t child = fork();
  if (child == 0) {
    auto transport = *ShmTransport::make({});
    Party side{nullptr, {}};
    (void)transport->adopt(dup(ends[1]));
    side.transport = std::move(transport);
    drive({&side}, [] { return false; });
    _exit(0);
  }
  Party side{nullptr, {}};
  auto transport = *ShmTransport::make({});
  (void)transport->adopt(ends[0]);
  side.transport = std::move(transport);
  ASSERT_TRUE(drive({&side}, [&] { return side.count<PeerUp>() > 0; }));
  kill(child, SIGKILL);
  EXPECT_TRUE(drive({&side}, [&] { return side.count<PeerDown>() > 0; }));  // ends[1] is still open here
  EXPECT_THAT(to_string(side.all<PeerDown>()[0].reason), HasSubstr("the peer's process died"));
  waitpid(child, nullptr, 0);
  close(ends[1]);
}

}  // namespace
}  // namespace kvloom
