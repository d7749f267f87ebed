#include "kvloom/sim/simulate.h"

#include <set>

#include "kvloom/sim/world.h"

namespace kvloom {
namespace {

std::uint64_t seed_of(const SimulateJob& job, std::int64_t schedule) {
  return sim::mix(job.seed * 0x1000003 + static_cast<std::uint64_t>(schedule));
}

// Leaves out one fault after the other, as long as something still breaks; then tells what happens with those that are left.
std::vector<std::string> shortened(std::uint64_t seed) {
  std::set<sim::FaultId> left_out;
  const auto breaks = [&](const std::set<sim::FaultId>& without, std::vector<std::string>* said,
                          std::vector<sim::FaultId>* injected) {
    SimulateReport ignored;
    ignored.receiver_edges.resize(Receiver::edges().size() + 1);
    ignored.sender_edges.resize(Sender::edges().size() + 1);
    sim::World world(seed, without, ignored, said);
    const bool broken = world.run().has_value();
    if (injected != nullptr) *injected = world.injected();
    return broken;
  };
  std::vector<sim::FaultId> injected;
  breaks(left_out, nullptr, &injected);
  for (bool shorter = true; shorter;) {
    shorter = false;
    for (const sim::FaultId& fault : injected) {
      auto without = left_out;
      if (!without.insert(fault).second || !breaks(without, nullptr, nullptr)) continue;
      left_out = std::move(without);
      shorter = true;
    }
    breaks(left_out, nullptr, &injected);  // what is left out may have changed what else happens
  }
  std::vector<std::string> said;
  breaks(left_out, &said, nullptr);
  return said;
}

}  // namespace

SimulateReport simulate(const SimulateJob& job) {
  SimulateReport report;
  report.receiver_edges.resize(Receiver::edges().size() + 1);
  report.sender_edges.resize(Sender::edges().size() + 1);
  const std::set<sim::FaultId> none;
  for (std::int64_t schedule = job.first; schedule < job.first + job.count; ++schedule) {
    ++report.schedules;
    sim::World world(seed_of(job, schedule), none, report, nullptr);
    const auto broken = world.run();
    if (!broken) continue;
    report.violations.push_back({schedule, *broken, job.trace ? shortened(seed_of(job, schedule)) : std::vector<std::string>()});
    if (report.violations.size() >= job.most_violations) break;
  }
  return report;
}

}  // namespace kvloom
