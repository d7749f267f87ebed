// doctor.cc: `kvloom doctor`: what can run on this machine and why not, and what it has.  Stage: tools.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "kvloom/tools/cuda_gpus.h"
#include "kvloom/tools/machine.h"
#include "kvloom/tools/print.h"
#include "kvloom/tools/verb.h"
#include "kvloom/transport/copy.h"

namespace kvloom {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kDoctorExamples =
    "Examples:\n"
    "  kvloom doctor\n"
    "  kvloom doctor --json\n"
    "\n"
    "Exit codes: 0 at least one transport that crosses processes can run, 1 none can.";

// One thing that was tried: what, whether it works, and the words of why not or of what follows.
struct Finding {
  std::string name;
  bool works = false;
  std::string why;
};

// A descriptor of ours, closed at the end.
class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (value_ >= 0) close(value_);
  }
  int value() const { return value_; }
  bool open() const { return value_ >= 0; }

 private:
  int value_;
};

std::string reason() { return std::strerror(errno); }

// ---- what shm stands on ----

Finding try_memfd() {
  const Descriptor memory(memfd_create("kvloom-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.open()) return {"memfd_create", false, reason()};
  constexpr std::size_t kBytes = 1 << 16;
  if (ftruncate(memory.value(), kBytes) != 0) return {"memfd_create", false, "ftruncate: " + reason()};
  void* mapped = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.value(), 0);
  if (mapped == MAP_FAILED) return {"memfd_create", false, "mmap: " + reason()};
  std::memset(mapped, 1, kBytes);
  munmap(mapped, kBytes);
  return {"memfd_create", true, "memory without a name: nothing stays behind"};
}

Finding try_seals() {
  const Descriptor memory(memfd_create("kvloom-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.open()) return {"seals", false, reason()};
  if (ftruncate(memory.value(), 4096) != 0 || fcntl(memory.value(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    return {"seals", false, reason()};
  const bool held = ftruncate(memory.value(), 0) != 0;
  return {"seals", held, held ? "a peer can't shrink memory under us" : "a sealed memory could be shrunk"};
}

Finding try_pidfd() {
  const Descriptor own(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
  if (!own.open()) return {"pidfd", false, reason()};
  return {"pidfd", true, "a peer's death is seen at once"};
}

// A descriptor handed over a socket, as regions are.
Finding try_sockets() {
  std::array<int, 2> pair{-1, -1};
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair.data()) != 0) return {"Unix sockets", false, reason()};
  const Descriptor left(pair[0]), right(pair[1]);
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  char byte = 1;
  iovec part{&byte, 1};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  const int handed = left.value();
  std::memcpy(CMSG_DATA(header), &handed, sizeof handed);
  if (sendmsg(left.value(), &message, MSG_NOSIGNAL) != 1)
    return {"Unix sockets", false, "handing over a descriptor: " + reason()};
  if (recvmsg(right.value(), &message, MSG_CMSG_CLOEXEC) != 1 || message.msg_controllen < CMSG_LEN(sizeof(int)))
    return {"Unix sockets", false, "taking a descriptor: " + reason()};
  int taken = -1;
  std::memcpy(&taken, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof taken);
  const Descriptor close_taken(taken);
  return {"Unix sockets", true, "descriptors can be handed over"};
}

std::vector<Finding> shm_findings() { return {try_memfd(), try_seals(), try_pidfd(), try_sockets()}; }

// ---- transports ----

// cuda has its GPUs, and for the rest what shm has.
std::vector<Finding> transports(const std::vector<Finding>& shm, const GpuLook& gpus) {
  std::string missing;
  for (const Finding& finding : shm)
    if (!finding.works) missing += fmt::format("{}{} ({})", missing.empty() ? "" : ", ", finding.name, finding.why);
  constexpr const char* kAbsent = "not built in this version";
  return {{"shm", missing.empty(), missing.empty() ? "processes of one host; /dev/shm is not needed" : "missing: " + missing},
          {"loopback", true, "within one process, for tests"},
          {"cuda", gpus.works && missing.empty(), missing.empty() || !gpus.works ? gpus.why : "missing: " + missing},
          {"ucx", false, kAbsent},
          {"mooncake", false, kAbsent},
          {"nixl", false, kAbsent}};
}

// ---- the machine ----

std::string cpu_model() {
  std::ifstream in("/proc/cpuinfo");
  std::string line;
  while (std::getline(in, line))
    if (line.rfind("model name", 0) == 0 && line.find(": ") != std::string::npos) return line.substr(line.find(": ") + 2);
  return "unknown";
}

std::int64_t usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : sysconf(_SC_NPROCESSORS_ONLN);
}

struct Limit {
  std::string name;
  std::optional<std::int64_t> now, most;  // nothing: unlimited
};

Limit read_limit(const std::string& name, __rlimit_resource_t resource) {
  rlimit limit{};
  getrlimit(resource, &limit);
  const auto value = [](rlim_t number) {
    return number == RLIM_INFINITY ? std::nullopt : std::optional(static_cast<std::int64_t>(number));
  };
  return {name, value(limit.rlim_cur), value(limit.rlim_max)};
}

struct Machine {
  std::string system, cpu;
  std::int64_t cores = 0;
  std::vector<std::string> kernels;  // copy kernels, the fastest last
  Memory memory;
  Limit files, locked;
};

Machine examine() {
  utsname system{};
  uname(&system);
  Machine out{fmt::format("{} {} {}", system.sysname, system.release, system.machine),
              cpu_model(),
              usable_cores(),
              {},
              read_memory(),
              read_limit("open_files", RLIMIT_NOFILE),
              read_limit("locked_memory", RLIMIT_MEMLOCK)};
  for (const CopyKernel& kernel : copy_kernels()) out.kernels.emplace_back(kernel.name);
  return out;
}

// ---- output ----

Json findings_json(const std::vector<Finding>& findings, const char* works) {
  Json out = Json::array();
  for (const Finding& finding : findings) out.push_back({{"name", finding.name}, {works, finding.works}, {"why", finding.why}});
  return out;
}

Json optional_json(const std::optional<std::int64_t>& value) { return value ? Json(*value) : Json(); }

Json gpus_json(const GpuLook& look) {
  Json out = {{"works", look.works}, {"why", look.why}, {"driver", look.driver}};
  for (const char* list : {"gpus", "links", "choices"}) out[list] = Json::array();
  for (const GpuSeen& gpu : look.gpus)
    out["gpus"].push_back({{"ordinal", gpu.ordinal},
                           {"name", gpu.name},
                           {"multiprocessors", gpu.multiprocessors},
                           {"copy_engines", gpu.copy_engines}});
  for (const GpuLink& link : look.links)
    out["links"].push_back({{"from", link.from},
                            {"to", link.to},
                            {"peer_access", link.peer_access},
                            {"native_atomics", link.native_atomics},
                            {"performance_rank", link.performance_rank}});
  for (const GpuChoice& choice : look.choices) out["choices"].push_back({{"run", choice.run}, {"choice", choice.choice}});
  return out;
}

Json doctor_json(const std::vector<Finding>& shm, const GpuLook& gpus, const Machine& machine) {
  Json out;
  out["transports"] = findings_json(transports(shm, gpus), "can_run");
  out["shm_needs"] = findings_json(shm, "works");
  out["cuda"] = gpus_json(gpus);
  out["system"] = machine.system;
  out["cpu"] = machine.cpu;
  out["cores"] = machine.cores;
  out["copy_kernels"] = machine.kernels;
  out["memory"] = {{"total", optional_json(machine.memory.total)},
                   {"available", optional_json(machine.memory.available)},
                   {"cgroup_limit", optional_json(machine.memory.cgroup_limit)},
                   {"cgroup_used", optional_json(machine.memory.cgroup_used)},
                   {"usable", optional_json(machine.memory.usable())}};
  for (const Limit& limit : {machine.files, machine.locked})
    out["limits"][limit.name] = {{"now", optional_json(limit.now)}, {"most", optional_json(limit.most)}};
  return out;
}

void print_findings(std::FILE* out, const std::vector<Finding>& findings, const char* yes, const char* no) {
  for (const Finding& finding : findings)
    fmt::print(out, "  {:<14} {:<8} {}\n", finding.name, finding.works ? yes : no, finding.why);
}

std::string bytes_or(const std::optional<std::int64_t>& bytes, const char* otherwise) {
  return bytes ? bytes_text(Bytes(*bytes)) : otherwise;
}

void print_machine(std::FILE* out, const Machine& machine) {
  const bool streaming = machine.kernels.size() > 1;
  const auto count_or = [](const std::optional<std::int64_t>& count) {
    return count ? count_text(*count) : std::string("unlimited");
  };
  fmt::print(out, "\nMachine\n  system         {}\n  CPU            {}, {} cores for us\n", machine.system, machine.cpu,
             machine.cores);
  fmt::print(out, "  copy kernels   {}{}\n", fmt::join(machine.kernels, ", "),
             streaming ? fmt::format(": {} streams past the caches", machine.kernels.back())
                       : ": no streaming stores, large pages copy slower");
  fmt::print(out, "  memory         {} of {} available\n", bytes_or(machine.memory.available, "?"),
             bytes_or(machine.memory.total, "?"));
  fmt::print(out, "  container      {}\n",
             machine.memory.cgroup_limit ? fmt::format("limit {}, {} used", bytes_or(machine.memory.cgroup_limit, "?"),
                                                       bytes_or(machine.memory.cgroup_used, "?"))
                                         : "no memory limit");
  fmt::print(out, "  open files     {}, can be raised to {}\n", count_or(machine.files.now), count_or(machine.files.most));
  fmt::print(out, "  locked memory  {}, can be raised to {}\n", bytes_or(machine.locked.now, "unlimited"),
             bytes_or(machine.locked.most, "unlimited"));
}

// How the GPU of the row reads the memory of that of the column.
void print_links(std::FILE* out, const GpuLook& look) {
  std::vector<TextTable::Column> columns = {{"GPU reads", TextTable::Align::left}};
  for (const GpuSeen& gpu : look.gpus) columns.push_back({fmt::format("{}", gpu.ordinal)});
  TextTable table(std::move(columns));
  for (const GpuSeen& from : look.gpus) {
    std::vector<std::string> row = {fmt::format("{}", from.ordinal)};
    for (const GpuSeen& to : look.gpus) {
      const GpuLink* link = look.link(from.ordinal, to.ordinal);
      row.push_back(link == nullptr ? "-"
                    : !link->peer_access
                        ? "no"
                        : fmt::format("{}, rank {}", link->native_atomics ? "NVLink" : "PCIe", link->performance_rank));
    }
    table.add(std::move(row));
  }
  table.print(out, 2);
}

void print_gpus(std::FILE* out, const GpuLook& look) {
  if (!look.gpus.empty()) fmt::print(out, "\nGPUs, with a driver for CUDA {}\n", look.driver);
  for (const GpuSeen& gpu : look.gpus)
    fmt::print(out, "  {:<14} {}, {} SMs, {} copy engines\n", gpu.ordinal, gpu.name, gpu.multiprocessors, gpu.copy_engines);
  if (!look.links.empty()) print_links(out, look);
  if (look.works) fmt::print(out, "\nHow cuda would copy\n");
  for (const GpuChoice& choice : look.choices)
    if (look.works) fmt::print(out, "  {:<32} {}\n", choice.run, choice.choice);
}

ExitCode doctor(const Context& context, bool as_json) {
  const std::vector<Finding> shm = shm_findings();
  const GpuLook gpus = look_at_gpus();
  const Machine machine = examine();
  if (as_json) {
    fmt::print(context.out, "{}\n", doctor_json(shm, gpus, machine).dump(2));
  } else {
    fmt::print(context.out, "Transports\n");
    print_findings(context.out, transports(shm, gpus), "can run", "can't");
    fmt::print(context.out, "\nWhat shm stands on\n");
    print_findings(context.out, shm, "works", "fails");
    print_gpus(context.out, gpus);
    print_machine(context.out, machine);
  }
  return std::all_of(shm.begin(), shm.end(), [](const Finding& finding) { return finding.works; }) ? kFine : kJobFailed;
}

}  // namespace

void add_doctor(CLI::App& app, Context& context) {
  auto json = std::make_shared<bool>(false);  // shared by the option and the body
  CLI::App* verb = add_verb(app, context, "doctor", "Say which transports can run here, and why others can't", kDoctorExamples,
                            [&context, json]() -> Expected<ExitCode> { return doctor(context, *json); });
  verb->add_flag("--json", *json, "Print JSON, numbers in bytes");
}

}  // namespace kvloom
