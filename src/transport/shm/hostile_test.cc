// What a hostile peer of a ring can do: nothing. It greets as it should unless told otherwise, and then says what a test wants.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "kvloom/transport/shm/cpu_device.h"
#include "kvloom/transport/shm/shm.h"
#include "tests/conformance/conformance.h"

namespace kvloom {
namespace {

using shm::Kind;
using shm::Message;
using shm::Slot;
using shm::SlotKind;
using testing::HasSubstr;

// A peer made by hand: it greets as it should unless told otherwise, and then says what a test wants.
class Hostile {
 public:
  static constexpr shm::OutboxShape kShape{64, 16};

  explicit Hostile(const std::string& address)
      : socket_(*shm::connect_to(address.substr(4))),
        outbox_memory_(*shm::make_shared_memory("hostile", kShape.bytes())),
        outbox_(outbox_memory_.mapping.memory().data(), kShape) {}

  void greet() { send({Kind::hello, 0, shm::CpuDevice::kProtocol, kShape.slots, kShape.answers}, &outbox_memory_.fd); }
  void send(const Message& message, const shm::Fd* fd = nullptr) {
    ASSERT_EQ(shm::send(socket_, message, {}, fd), shm::Sent::yes);
  }
  Expected<std::optional<shm::Received>> receive() { return shm::receive(socket_); }
  void send_raw(std::span<const std::byte> bytes) {
    ASSERT_EQ(::send(socket_.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  }
  void offer(std::uint64_t region, Bytes length, std::uint64_t said) {
    const auto memory = shm::make_shared_memory("hostile", length);
    send({Kind::offer, 0, region, said, 0}, &memory->fd);
  }
  void put(const Slot& slot) {
    outbox_.put(outbox_.slot(outbox_.header().produced.load()), slot);
    outbox_.header().produced.fetch_add(1);
  }
  void begin_write(std::uint64_t operation, std::uint64_t source, std::uint64_t target, std::uint64_t runs) {
    Slot slot = {};
    slot.kind = SlotKind::write;
    slot.operation = operation;
    slot.write = {kTag.value, source, target, runs};
    put(slot);
  }
  void put_run(std::int64_t source_offset, std::int64_t target_offset, std::int64_t bytes, std::int64_t count = 1,
               std::int64_t source_step = 0, std::int64_t target_step = 0) {
    Slot slot = {};
    slot.kind = SlotKind::run;
    slot.run = {source_offset, target_offset, bytes, count, source_step, target_step};
    put(slot);
  }
  void put_pack(std::uint8_t count, std::initializer_list<shm::PackSlot::Distance> distances, std::uint8_t shift = 0) {
    shm::PackSlot pack = {static_cast<std::uint32_t>(SlotKind::pack), count, shift, shift, 0, {}};
    std::copy(distances.begin(), distances.end(), pack.distances.begin());
    put(std::bit_cast<Slot>(pack));
  }
  void change_last(const shm::PackSlot& pack) { outbox_.put(outbox_.slot(outbox_.header().produced.load() - 1), pack); }
  shm::OutboxHeader& header() { return outbox_.header(); }
  shm::OutboxView outbox() { return outbox_; }

 private:
  shm::Fd socket_;
  shm::SharedMemory outbox_memory_;
  shm::OutboxView outbox_;
};

class HostilePeer : public testing::Test {
 protected:
  HostilePeer() {
    side_.transport = *ShmTransport::make({{.listen = "*"}});
    memory_.assign(4096, std::byte{7});
    region_ = *side_.transport->register_memory(memory_);
  }

  // Another peer has greeted, and the one before is gone.
  void greet() {
    const auto ups = side_.count<PeerUp>();
    hostile_ = std::make_unique<Hostile>(side_.transport->address());
    hostile_->greet();
    ASSERT_TRUE(drive({&side_}, [&] { return side_.count<PeerUp>() > ups; }));
    peer_ = side_.all<PeerUp>().back().peer;
  }

  // Greeted, and its tag admitted.
  void meet() {
    greet();
    ASSERT_TRUE(side_.transport->admit(peer_, kTag));
  }

  // Met; and a write of this many runs has begun, from region 1 of its own, into `region_`.
  void begin_write(std::uint64_t runs) {
    meet();
    hostile_->offer(1, Bytes(4096), 4096);
    hostile_->begin_write(0, 1, region_.id().value, runs);
  }

  // What the transport found wrong; the rest of it goes on, and no memory was touched.
  std::string verdict() {
    EXPECT_TRUE(drive({&side_}, [&] { return side_.count<PeerDown>() > 0; }));
    for (const std::byte b : memory_) EXPECT_EQ(b, std::byte{7});
    return side_.count<PeerDown>() == 0 ? "nothing" : to_string(side_.all<PeerDown>()[0].reason);
  }

  std::vector<std::byte> memory_;
  Party side_;
  Region region_;
  std::unique_ptr<Hostile> hostile_;
  PeerId peer_;
};

TEST_F(HostilePeer, CanWriteWhatItMay) {
  begin_write(1);
  hostile_->put_run(0, 0, 4096);
  EXPECT_TRUE(drive({&side_}, [&] { return memory_[4095] == std::byte{0}; }));
}

TEST_F(HostilePeer, IsDroppedBeforeItIsUpIfItsGreetingIsWrong) {
  const auto gone = [&](const std::function<void(Hostile&)>& greet) {
    Hostile peer(side_.transport->address());
    greet(peer);
    const auto seen = side_.events.size();
    for (int i = 0; i < 20; ++i) side_.poll();
    return side_.events.size() == seen;  // nobody was told of it
  };
  const auto outbox = shm::make_shared_memory("x", Hostile::kShape.bytes());
  const shm::Fd unsealed(memfd_create("x", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(unsealed.get(), Hostile::kShape.bytes().value), 0);
  const auto small = shm::make_shared_memory("x", Bytes(4096));
  const shm::Fd file(open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  EXPECT_TRUE(gone([&](Hostile& p) { p.send_raw(bytes_of("nonsense")); }));
  EXPECT_TRUE(gone([&](Hostile& p) { p.send_raw(std::vector<std::byte>(5000)); }));
  EXPECT_TRUE(gone([&](Hostile& p) { p.send({Kind::bell, 0, 0, 0, 0}); }));
  EXPECT_TRUE(gone([&](Hostile& p) { p.send({Kind::hello, 0, shm::CpuDevice::kProtocol, 64, 16}); })) << "no descriptor";
  EXPECT_TRUE(gone([&](Hostile& p) { p.send({Kind::hello, 0, shm::CpuDevice::kProtocol + 1, 64, 16}, &outbox->fd); }));
  EXPECT_TRUE(gone([&](Hostile& p) { p.send({Kind::hello, 0, shm::CpuDevice::kProtocol, 63, 16}, &outbox->fd); }));
  EXPECT_TRUE(gone([&](Hostile& p) {
    p.send({Kind::hello, 0, shm::CpuDevice::kProtocol, std::uint64_t{1} << 63, 16}, &outbox->fd);
  }));
  EXPECT_TRUE(gone([&](Hostile& p) { p.send({Kind::hello, 0, shm::CpuDevice::kProtocol, 64, 16}, &unsealed); }));
  EXPECT_TRUE(gone([&](Hostile& p) { p.send({Kind::hello, 0, shm::CpuDevice::kProtocol, 64, 16}, &small->fd); }));
  EXPECT_TRUE(gone([&](Hostile& p) { p.send({Kind::hello, 0, shm::CpuDevice::kProtocol, 64, 16}, &file); }));
}

TEST_F(HostilePeer, CannotWriteOutsideOfARegion) {
  begin_write(1);
  hostile_->put_run(0, 4000, 97);
  EXPECT_THAT(verdict(), HasSubstr("the peer's run: target bytes [4000, 4097) are outside of the region's [0, 4096)"));
}

TEST_F(HostilePeer, CannotReadOutsideOfItsOwn) {
  begin_write(1);
  hostile_->put_run(4096, 0, 1);
  EXPECT_THAT(verdict(), HasSubstr("the peer's run: source bytes [4096, 4097)"));
}

TEST_F(HostilePeer, CannotOverflowOurSums) {
  begin_write(1);
  hostile_->put_run(0, 8, 8, std::numeric_limits<std::int64_t>::max(), 0, -8);
  EXPECT_THAT(verdict(), HasSubstr("does not fit 64 bits"));
}

TEST_F(HostilePeer, CannotSayThatItsMemoryIsLonger) {
  meet();
  hostile_->offer(1, Bytes(4096), 8192);
  EXPECT_THAT(verdict(), HasSubstr("the peer offers region 1: a memfd of 4096 bytes where 8192 were said"));
}

TEST_F(HostilePeer, CannotOfferARegionTwiceOrWithAbsurdLengths) {
  meet();
  hostile_->offer(1, Bytes(4096), 4096);
  hostile_->offer(1, Bytes(4096), 4096);
  EXPECT_THAT(verdict(), HasSubstr("the peer offers region 1 twice"));
}

TEST_F(HostilePeer, CannotOfferAnAbsurdLength) {
  meet();
  hostile_->offer(1, Bytes(4096), std::uint64_t{1} << 63);
  EXPECT_THAT(verdict(), HasSubstr("a region of 9223372036854775808 bytes"));
}

TEST_F(HostilePeer, CannotWriteFromMemoryThatItNeverOffered) {
  meet();
  hostile_->begin_write(0, 9, region_.id().value, 1);
  EXPECT_THAT(verdict(), HasSubstr("the peer writes from region 9, which it never offered"));
}

TEST_F(HostilePeer, CannotWithdrawMemoryThatAWriteReads) {
  begin_write(2);
  for (int i = 0; i < 10; ++i) side_.poll();
  hostile_->send({Kind::withdraw, 0, 1, 0, 0});
  for (int i = 0; i < 10; ++i) side_.poll();
  hostile_->put_run(0, 0, 4096);
  EXPECT_THAT(verdict(), HasSubstr("the peer withdrew region 1 while a write reads it"));
}

TEST_F(HostilePeer, CannotFillMoreThanItsRing) {
  meet();
  hostile_->header().produced.store(65);
  EXPECT_THAT(verdict(), HasSubstr("65 slots wait in a ring of 64"));
}

TEST_F(HostilePeer, CannotSkipAnOperation) {
  meet();
  hostile_->offer(1, Bytes(4096), 4096);
  hostile_->begin_write(5, 1, region_.id().value, 0);
  EXPECT_THAT(verdict(), HasSubstr("operation 5, where operation 0 should begin"));
}

TEST_F(HostilePeer, CannotPutSomethingElseWhereARunShouldBe) {
  begin_write(1);
  hostile_->begin_write(1, 1, region_.id().value, 1);
  EXPECT_THAT(verdict(), HasSubstr("slot 1 is of kind 1, where a run should be"));
}

TEST_F(HostilePeer, CanPackRunsThatItMay) {
  begin_write(3);
  hostile_->put_run(1024, 1024, 1024);
  hostile_->put_pack(2, {{-1, -1}, {2, 1}}, 10);
  EXPECT_TRUE(drive({&side_}, [&] { return memory_[0] == std::byte{0} && memory_[3071] == std::byte{0}; }));
  EXPECT_EQ(memory_[3072], std::byte{7});
}

TEST_F(HostilePeer, CannotPackRunsBeforeThereIsOne) {
  begin_write(2);
  hostile_->put_pack(2, {{0, 0}, {1, 1}});
  EXPECT_THAT(verdict(), HasSubstr("slot 1 is of kind 4, where a run should be"));
}

TEST_F(HostilePeer, CannotPackARunOutsideOfTheMemory) {
  begin_write(2);
  hostile_->put_run(0, 0, 1024);
  hostile_->put_pack(1, {{3, 4}}, 10);
  EXPECT_TRUE(drive({&side_}, [&] { return side_.count<PeerDown>() > 0; }));
  EXPECT_THAT(to_string(side_.all<PeerDown>()[0].reason),
              HasSubstr("target bytes [4096, 5120) are outside of the region's [0, 4096)"));
  EXPECT_TRUE(std::all_of(memory_.begin() + 1024, memory_.end(), [](std::byte b) { return b == std::byte{7}; }));
}

// What a poll leaves of a slot is read again: what stands there then is checked anew.
TEST_F(HostilePeer, CannotChangeASlotThatIsHalfTaken) {
  for (const bool fewer : {true, false}) {
    const auto downs = side_.count<PeerDown>();
    begin_write(8);
    hostile_->put_run(0, 0, 256);
    hostile_->put_pack(7, {{0, 1}, {0, 2}, {0, 3}, {0, 4}, {0, 5}, {0, 6}, {0, 7}}, 8);
    memory_.assign(4096, std::byte{7});
    ASSERT_TRUE(drive({}, [&] {
      side_.poll({.copy = Bytes(300)});
      return memory_[3 * 256] == std::byte{0};
    }));
    ASSERT_EQ(memory_[6 * 256], std::byte{7}) << "it is half taken";
    hostile_->change_last(fewer ? shm::PackSlot{static_cast<std::uint32_t>(SlotKind::pack), 1, 8, 8, 0, {}}
                                : shm::PackSlot{static_cast<std::uint32_t>(SlotKind::pack),
                                                7,
                                                8,
                                                8,
                                                0,
                                                {{{0, 99}, {0, 99}, {0, 99}, {0, 99}, {0, 99}, {0, 99}, {0, 99}}}});
    ASSERT_TRUE(drive({&side_}, [&] { return side_.count<PeerDown>() > downs; }));
    EXPECT_THAT(to_string(side_.all<PeerDown>().back().reason), HasSubstr(fewer ? "packs 1 runs" : "are outside of the region"));
    EXPECT_EQ(memory_[7 * 256], std::byte{7});
  }
}

TEST_F(HostilePeer, CannotPackMoreThanFollows) {
  for (const auto& [count, shift] : {std::pair(3, 0), std::pair(8, 0), std::pair(0, 0), std::pair(2, 40)}) {
    const auto downs = side_.count<PeerDown>();
    begin_write(3);
    hostile_->put_run(0, 0, 1);
    hostile_->put_pack(static_cast<std::uint8_t>(count), {{0, 1}, {0, 2}, {0, 3}}, static_cast<std::uint8_t>(shift));
    ASSERT_TRUE(drive({&side_}, [&] { return side_.count<PeerDown>() > downs; }));
    EXPECT_THAT(to_string(side_.all<PeerDown>().back().reason),
                HasSubstr(fmt::format("packs {} runs in units of 2^{} and 2^{} bytes, where 2 may follow", count, shift, shift)));
  }
}

// The base of a refused write is not checked; what is packed after it must not be worked out from it.
TEST_F(HostilePeer, CannotOverflowARefusedWrite) {
  greet();
  hostile_->offer(1, Bytes(4096), 4096);
  hostile_->begin_write(0, 1, region_.id().value, 3);  // its tag is not admitted
  hostile_->put_run(std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::max(), 1);
  hostile_->put_pack(2, {{1, 1}, {std::numeric_limits<std::int32_t>::max(), 1}}, shm::kMostShift);
  for (int k = 0; k < 20; ++k) side_.poll();
  EXPECT_EQ(side_.count<PeerDown>(), 0u);
}

TEST_F(HostilePeer, CannotSendANoticeOfAnyLength) {
  meet();
  Slot slot = {};
  slot.kind = SlotKind::notice;
  slot.notice = {kTag.value, std::uint64_t{1} << 40};
  hostile_->put(slot);
  EXPECT_THAT(verdict(), HasSubstr("the peer's notice has 1099511627776 bytes"));
}

TEST_F(HostilePeer, WhoReadsNoOffersIsWaitedForAsleep) {
  meet();
  constexpr std::size_t kRegions = 400;  // more offers than a socket holds
  std::vector<Region> regions;
  for (std::size_t i = 0; i < kRegions; ++i) {
    regions.push_back(*side_.transport->allocate(Bytes(64)));
    side_.transport->write({regions.back().id(), {peer_, RegionId(1), Bytes(64)}, kTag, {}});
  }
  const auto is_readable = [](int fd, int wait_ms) {
    pollfd waiting{fd, POLLIN, 0};
    return ::poll(&waiting, 1, wait_ms) == 1;
  };
  ASSERT_TRUE(drive({&side_}, [&] {
    const auto fd = side_.transport->arm();
    return fd && !is_readable(*fd, 0);
  })) << "there is nothing to do, and it is not asleep";
  std::size_t offers = 0;
  const auto take = [&] {
    for (auto message = hostile_->receive(); message && *message; message = hostile_->receive())
      offers += (*message)->message.kind == Kind::offer ? 1u : 0u;
    return offers;
  };
  const auto fd = side_.transport->arm();
  EXPECT_LT(take(), kRegions);
  EXPECT_TRUE(is_readable(*fd, 10'000)) << "the peer has read, and nobody heard";
  EXPECT_TRUE(drive({&side_}, [&] { return take() == kRegions; }));
}

TEST_F(HostilePeer, CannotGreetTwice) {
  meet();
  hostile_->greet();
  EXPECT_THAT(verdict(), HasSubstr("greeting is not its first message, or came twice"));
}

TEST_F(HostilePeer, CannotAnswerWhatWasNotAsked) {
  meet();
  hostile_->header().answered.store(3);
  EXPECT_THAT(verdict(), HasSubstr("the peer answered 3 operations of 0 that it was sent"));
}

TEST_F(HostilePeer, CannotVouchForOtherCounts) {
  meet();
  side_.transport->notify(peer_, kTag, bytes_of("four"));
  hostile_->outbox().put(hostile_->outbox().answer(0), shm::Answer{shm::Outcome::delivered, 3});
  hostile_->header().answered.store(1);
  EXPECT_THAT(verdict(), HasSubstr("the peer vouches for 3 bytes of 4"));
  ASSERT_EQ(side_.count<Completed>(), 1u);
  EXPECT_FALSE(side_.all<Completed>()[0].delivered);
}

TEST_F(HostilePeer, CannotTakeMoreThanItWasSent) {
  meet();
  hostile_->header().consumed.store(100);
  side_.transport->notify(peer_, kTag, bytes_of("four"));
  EXPECT_THAT(verdict(), HasSubstr("the peer took 100 slots of 0 that it was sent"));
}

TEST_F(HostilePeer, WhoClosesIsNotBelievedEvenIfAllWasCopied) {
  meet();
  hostile_->offer(1, Bytes(4096), 4096);
  hostile_->header().closed.store(1);
  Slot slot = {};
  slot.kind = SlotKind::notice;
  slot.notice = {kTag.value, 0};
  hostile_->put(slot);
  EXPECT_THAT(verdict(), HasSubstr("the peer closed the connection"));
  EXPECT_TRUE(side_.count<Notice>() == 0);
}

}  // namespace
}  // namespace kvloom
