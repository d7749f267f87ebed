// The thread of an endpoint, driven with an endpoint that only counts.
#include "kvloom/session/endpoint_thread.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <thread>

#include "kvloom/transport/loopback/loopback.h"

namespace kvloom {
namespace {

struct Nothing {};

// Sleeps on `wake` alone, as an endpoint does that has nothing to do.
struct Counting {
  int works = 0, idle_wakes = 0;  // idle: woken, and then nothing had been posted
  int seen = 0;

  bool poll(std::chrono::nanoseconds wait, std::vector<Nothing>& /*events*/, int wake) {
    if (wait <= wait.zero()) return false;
    if (works == seen && woken_) ++idle_wakes;
    seen = works;
    pollfd fd{wake, POLLIN, 0};
    ::poll(&fd, 1, static_cast<int>(wait / std::chrono::milliseconds(1)));
    woken_ = (fd.revents & POLLIN) != 0;
    return false;
  }

 private:
  bool woken_ = false;
};

TEST(EndpointThread, SleepsAsSoonAsNothingIsPosted) {
  LoopbackWorld world;
  const auto transport = world.endpoint({});
  EndpointThread<Counting, Nothing> thread(std::make_unique<Counting>(), *transport, [](std::vector<Nothing>&) {});
  constexpr int kEach = 20'000, kPosters = 3;
  std::vector<std::thread> posters;
  for (int i = 0; i < kPosters; ++i)
    posters.emplace_back([&] {
      for (int n = 0; n < kEach; ++n) thread.post([](Counting& endpoint) { ++endpoint.works; });
    });
  for (std::thread& poster : posters) poster.join();
  const Counting counted = thread.ask([](Counting& endpoint) { return endpoint; });
  EXPECT_EQ(counted.works, kEach * kPosters);
  EXPECT_EQ(counted.idle_wakes, 0) << "a wake-up that nothing stands behind spins for ever";
}

}  // namespace
}  // namespace kvloom
