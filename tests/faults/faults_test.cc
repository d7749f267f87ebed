// Real processes over shm, and where there is a GPU over cuda, killed and frozen in each role and phase: survivors end, pools are full again, no
// byte is wrong, and the next transfer works.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>

#include "kvloom/tools/cluster.h"
#include "kvloom/tools/cuda_gpus.h"
#include "tests/shapes/shapes.h"

namespace kvloom {
namespace {

using namespace std::chrono_literals;

constexpr std::int32_t kLayers = 6;
constexpr auto kSilence = 1500ms;          // machines that run other tests beside are slow
constexpr auto kOver = kSilence + 8500ms;  // 2 s to end, and more where sanitizers are slow; far below the time of a transfer

enum class Phase : std::uint8_t { before_the_grant, before_the_first_byte, mid_stream, last_byte_sent, landed };
enum class Role : std::uint8_t { prefill, decode };
enum class Fault : std::uint8_t { killed, frozen };

struct Case {
  Role role;
  Fault fault;
  Phase phase;
  std::string transport;
};

std::string name_of(const Case& c) {
  constexpr const char* kPhases[] = {"BeforeTheGrant", "BeforeTheFirstByte", "MidStream", "LastByteSent", "Landed"};
  return std::string(c.role == Role::prefill ? "APrefillRank" : "ADecodeRank") +
         (c.fault == Fault::killed ? "Killed" : "Frozen") + kPhases[static_cast<int>(c.phase)];
}

std::vector<Case> all_cases(const std::string& transport) {
  std::vector<Case> out;
  for (const Role role : {Role::prefill, Role::decode})
    for (const Fault fault : {Fault::killed, Fault::frozen})
      for (int phase = 0; phase < 5; ++phase) out.push_back({role, fault, static_cast<Phase>(phase), transport});
  return out;
}

// A process that has asked the driver can't fork ranks any more: a child asks.
std::vector<Case> gpu_cases() {
  const pid_t child = fork();
  if (child == 0) _exit(look_at_gpus().works ? 0 : 1);
  int status = 0;
  if (child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0) return all_cases("cuda");
  std::puts("no GPU: the cases Gpu/Faults.* are not there");
  return {};
}

class Faults : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const CacheShape shape = shapes::mla(kLayers, 576);
    ClusterSpec spec;
    spec.prefill = std::make_shared<const Side>(shapes::side(shape, "cp=2:layers", 16));
    spec.decode = std::make_shared<const Side>(shapes::side(shape, "dcp=2", 16));
    spec.tokens_at_once = 1024;
    spec.requests_at_once = 4;
    spec.worker.heartbeat = 100ms;
    spec.worker.silence = kSilence;
    spec.worker.limits.resend = 50ms;
    spec.worker.limits.grace = 300ms;
    spec.worker.transport.name = GetParam().transport;
    auto made = WorkerCluster::make(spec);
    ASSERT_TRUE(made) << made.error().message;
    cluster = std::move(*made);
    victim = GetParam().role == Role::prefill ? cluster->prefill[1] : cluster->decode[1];
  }

  static ServedRequest request(std::int64_t number) {
    ServedRequest out;
    out.name = "req-" + std::to_string(number);
    out.number = number;
    out.total = 200;
    out.prefix = 16;
    out.time_ms = 120'000;  // nothing ends because of it
    return out;
  }

  // Until every source has taken as many grants as all decode ranks have sent it.
  bool granted() {
    const auto grants = [&](WorkerId worker) {
      const std::string text = cluster->workers.ask(worker, {{"do", "metrics"}}).value()["text"];
      const auto at = text.find("\nkvloom_grants_total{");
      return at == std::string::npos ? 0.0 : std::stod(text.substr(text.find("} ", at) + 2));
    };
    return cluster->listen_until([&] {
      return std::all_of(cluster->prefill.begin(), cluster->prefill.end(), [&](WorkerId w) { return grants(w) >= 2; });
    });
  }

  void hit() {
    hit_at = std::chrono::steady_clock::now();
    if (GetParam().fault == Fault::killed) return cluster->workers.kill(victim);
    cluster->workers.signal(victim, SIGSTOP);
    is_frozen = true;
  }

  bool survivors_are_over(const ServedRequest& r) {
    const ServedResult& result = cluster->result(r);
    return std::all_of(result.told.begin(), result.told.end(),
                       [&](WorkerId w) { return result.released.contains(w) || (is_frozen && w == victim); });
  }

  // What living workers other than a frozen one are told.
  template <class Tell>
  void tell_survivors(Tell tell) {
    if (!is_frozen) return (void)tell();
    auto& side = GetParam().role == Role::prefill ? cluster->prefill : cluster->decode;
    const auto all = side;
    std::erase(side, victim);
    tell();
    side = all;
  }

  void transfer(const ServedRequest& r) {
    ASSERT_TRUE(cluster->offer(r));
    ASSERT_TRUE(cluster->begin(r));
    ASSERT_TRUE(cluster->compute(r, 0, 100));
    ASSERT_TRUE(cluster->compute(r, 100, r.total));
    ASSERT_TRUE(cluster->listen_until([&] { return cluster->result(r).over(); }));
    std::string why;
    for (const auto& [worker, words] : cluster->result(r).whys) why += words + "; ";
    EXPECT_TRUE(cluster->result(r).landed()) << why;
    EXPECT_EQ(cluster->result(r).wrong_bytes, 0);
  }

  std::unique_ptr<WorkerCluster> cluster;
  WorkerId victim = 0;
  bool is_frozen = false;
  std::chrono::steady_clock::time_point hit_at;
};

TEST_P(Faults, CostItsOwnTransferOnlyAndLeaveNothingBehind) {
  const auto [role, fault, phase, transport] = GetParam();
  ServedRequest r = request(1);
  if (phase == Phase::before_the_grant) {
    r.time_ms = 1000;  // nobody may ever answer
    if (role == Role::decode) {
      ASSERT_TRUE(cluster->offer(r));
    }
    hit();
    if (role == Role::prefill) tell_survivors([&] { ASSERT_TRUE(cluster->offer(r)); });
    if (role == Role::prefill) {
      // The addresses are those of all prefill ranks, the lost one's among them.
      ASSERT_TRUE(cluster->begin(r));
    } else {
      tell_survivors([&] { ASSERT_TRUE(cluster->begin(r)); });
    }
  } else {
    ASSERT_TRUE(cluster->offer(r));
    ASSERT_TRUE(cluster->begin(r, false, true));
    ASSERT_TRUE(granted());
    if (phase == Phase::before_the_first_byte) hit();
    if (phase == Phase::mid_stream) {
      ASSERT_TRUE(cluster->compute(r, 0, r.total, {0, 1}));
      ASSERT_TRUE(cluster->listen_until([&] { return cluster->result(r).layers.size() >= 4; }));
      hit();
    }
    if (phase >= Phase::last_byte_sent) {
      ASSERT_TRUE(cluster->compute(r, 0, r.total));
    }
    if (phase == Phase::landed) {
      ASSERT_TRUE(cluster->listen_until([&] { return cluster->result(r).over(); }));
    }
    if (phase >= Phase::last_byte_sent) hit();
  }
  // Decode ranks that live get what is theirs: their sources have not lost anything.
  if (role == Role::decode) {
    ASSERT_TRUE(cluster->compute(r, 0, r.total));
  }
  ASSERT_TRUE(cluster->listen_until([&] { return survivors_are_over(r); }, kOver)) << "survivors are not over";
  const auto took = std::chrono::steady_clock::now() - hit_at;
  RecordProperty("survivors_over_ms", static_cast<int>(took / 1ms));
  if (phase < Phase::last_byte_sent) {
    EXPECT_FALSE(cluster->result(r).landed());
    // Who survives on the other side names the rank that was lost, or says whose grant or answer did not come.
    const char* lost = role == Role::prefill ? "prefill rank 1" : "decode rank";
    for (const WorkerId worker : role == Role::prefill ? cluster->decode : cluster->prefill)
      EXPECT_THAT(cluster->result(r).whys[worker], testing::HasSubstr(lost)) << cluster->workers.spec(worker).name();
  }
  if (phase != Phase::before_the_grant) {  // they have noticed, and not waited for their time, or for that of a grant
    for (const auto& [worker, why] : cluster->result(r).whys)
      EXPECT_THAT(why, testing::Not(testing::HasSubstr(" is up"))) << cluster->workers.spec(worker).name();
  }
  if (phase == Phase::landed) {
    EXPECT_TRUE(cluster->result(r).landed());
  }

  if (is_frozen) cluster->workers.signal(victim, SIGCONT);
  is_frozen = false;
  if (fault == Fault::killed) {
    ASSERT_TRUE(cluster->restart(victim));
  }
  ASSERT_TRUE(cluster->listen_until([&] { return cluster->result(r).over(); })) << "the one that came back is not over";
  EXPECT_EQ(cluster->result(r).wrong_bytes, 0);
  for (const WorkerId worker : cluster->all()) {
    const auto state = cluster->workers.ask(worker, {{"do", "state"}});
    ASSERT_TRUE(state) << state.error().message;
    EXPECT_EQ((*state)["taken"], 0) << cluster->workers.spec(worker).name();
    EXPECT_EQ((*state)["open"], 0) << cluster->workers.spec(worker).name();
    EXPECT_EQ((*state)["wrong_free_bytes"], 0) << cluster->workers.spec(worker).name();
  }
  transfer(request(2));
}

const auto kName = [](const auto& of) { return name_of(of.param); };
INSTANTIATE_TEST_SUITE_P(Each, Faults, testing::ValuesIn(all_cases("shm")), kName);
INSTANTIATE_TEST_SUITE_P(Gpu, Faults, testing::ValuesIn(gpu_cases()), kName);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Faults);

}  // namespace
}  // namespace kvloom
