// soak.cc: `kvloom soak`: a small cluster of real processes under load, with cancels and ranks that die, for as long as wanted.  Stage: tools.
// Every byte of every request that lands is checked, and so is every free page; at the end pools are full and nothing has leaked.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <deque>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>

#include "kvloom/tools/cluster.h"
#include "kvloom/tools/print.h"
#include "kvloom/tools/request_trace.h"
#include "kvloom/tools/transport_words.h"
#include "kvloom/tools/verb.h"

namespace kvloom {
namespace {

using nlohmann::json;

constexpr const char* kSoakExamples =
    "Examples:\n"
    "  kvloom soak --requests 2000 --seed 7\n"
    "  kvloom soak --requests 300 --prefill cp=4:layers --decode dcp=2 --trace samples/requests.jsonl\n"
    "  kvloom soak --requests 300 --transport cuda\n"
    "\n"
    "Requests of a trace's lengths (divided by --scale), several at once, in chunks, with prefix hits; some are cancelled at a "
    "random\n"
    "moment, and a rank is killed and started anew every so often: what fails by that is tried again. Exit code 1: a byte is "
    "wrong,\n"
    "pages, descriptors, memory or requests are lost, or survivors do not end by themselves.";

struct SoakWords {
  std::int64_t requests = 2000, at_once = 16, seed = -1, cancel_percent = 5, kill_every = 200, scale = 64, most_tokens = 512;
  std::string prefill = "cp=2:layers", decode = "dcp=2", trace;
  TransportWords transport;
  LogLevel log = LogLevel::error;
  bool json = false;
};

struct Lost {
  std::int64_t pages = 0, descriptors = 0, requests = 0;
};

struct SoakReport {
  std::int64_t landed = 0, cancelled = 0, failed = 0, attempts = 0, kills = 0, wrong_bytes = 0, bytes = 0;
  std::int64_t late = 0;         // attempts that survivors of a rank did not end by themselves
  std::int64_t grown_bytes = 0;  // of memory of the process that grew most, from the first request after its start to the end
  Lost lost;
  double seconds = 0;
};

// Sides, plans and ended transfers that are remembered fill up while it runs: a process grows by 2 MiB in 2,000 requests. More than this leaks.
constexpr std::int64_t kMostGrown = 64 << 20;
// For survivors to end what a dead rank had a part in, after all of it is computed. They see it at once, or do not hear of it for `silence`.
constexpr std::chrono::milliseconds kSilence{2000};
constexpr std::chrono::milliseconds kPatience = kSilence + std::chrono::milliseconds(2000);

// A small model of two cache groups: MLA rows and an indexer on every second layer.
Expected<CacheShape> small_model() {
  std::vector<LayerId> all, every_second;
  for (std::int32_t layer = 0; layer < 8; ++layer) {
    all.emplace_back(layer);
    if (layer % 2 == 0) every_second.emplace_back(layer);
  }
  return CacheShape::make("soak", 8,
                          {{"latent", GroupKind::paged, all, 1, {{"latent", 576, 1}}, {}, {}},
                           {"index_k", GroupKind::paged, every_second, 1, {{"keys", 128, 1}, {"scales", 4, 4}}, {}, {}}});
}

Expected<std::shared_ptr<const Side>> side_of(const CacheShape& shape, const std::string& words) {
  auto sharding = Sharding::parse(words);
  if (!sharding) return tl::unexpected(sharding.error());
  auto side = Side::make(shape, *sharding, 16);
  if (!side) return tl::unexpected(side.error());
  return std::make_shared<const Side>(std::move(*side));
}

class Soak {
 public:
  Soak(const SoakWords& words, std::uint64_t seed, std::vector<std::int64_t> lengths, const Context& context)
      : words_(words), random_(seed), lengths_(std::move(lengths)), context_(context) {}

  Expected<SoakReport> run() {
    const auto begun = std::chrono::steady_clock::now();
    if (auto ok = open(); !ok) return tl::unexpected(ok.error());
    if (auto ok = meet(); !ok) return tl::unexpected(ok.error());
    while (next_ < words_.requests || !open_.empty()) {
      while (next_ < words_.requests && static_cast<std::int64_t>(open_.size()) < words_.at_once) admit();
      if (auto ok = step(); !ok) return tl::unexpected(ok.error());
      while (cluster_->listen(std::chrono::milliseconds(0))) {}
      if (auto ok = settle(); !ok) return tl::unexpected(ok.error());
      if (auto ok = kill_now_and_then(); !ok) return tl::unexpected(ok.error());
    }
    if (auto ok = meet(); !ok) return tl::unexpected(ok.error());
    if (auto ok = count_lost(); !ok) return tl::unexpected(ok.error());
    report_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    return report_;
  }

 private:
  struct Open {
    ServedRequest request;
    std::int64_t chunk = 0, done = 0;  // tokens
    bool offered = false, begun = false, source_first = false, all_computed = false;
    std::int64_t cancel_at = -1;  // tokens computed
    bool cancelled = false, by_decode = false;
    bool orphaned = false;                          // a rank that was told of it has died, and nobody says so to the others
    std::chrono::steady_clock::time_point told_at;  // something of it, for the last time
  };

  std::int64_t draw(std::int64_t least, std::int64_t most) { return std::uniform_int_distribution(least, most)(random_); }
  bool chance(std::int64_t percent) { return draw(0, 99) < percent; }

  Expected<void> open() {
    const auto shape = small_model();
    if (!shape) return tl::unexpected(shape.error());
    ClusterSpec spec;
    auto prefill = side_of(*shape, words_.prefill), decode = side_of(*shape, words_.decode);
    if (!prefill) return tl::unexpected(prefill.error());
    if (!decode) return tl::unexpected(decode.error());
    spec.prefill = std::move(*prefill);
    spec.decode = std::move(*decode);
    spec.tokens_at_once = words_.most_tokens * words_.at_once;
    spec.requests_at_once = words_.at_once;
    spec.worker.transport = words_.transport;
    spec.worker.seed = random_();
    spec.worker.heartbeat = std::chrono::milliseconds(100);
    spec.worker.silence = kSilence;
    spec.worker.limits.resend = std::chrono::milliseconds(100);
    spec.worker.log = words_.log;
    auto made = WorkerCluster::make(spec);
    if (!made) return tl::unexpected(made.error());
    cluster_ = std::move(*made);
    return {};
  }

  // A request through everybody: all connections stand after it. What each process has open then is what it may have open.
  Expected<void> meet() {
    ServedRequest request;
    request.name = fmt::format("meet-{}", meetings_++);
    request.number = next_number_++;
    request.total = 64;
    if (auto ok = cluster_->offer(request); !ok) return ok;
    if (auto ok = cluster_->begin(request); !ok) return ok;
    if (auto ok = cluster_->compute(request, 0, request.total); !ok) return ok;
    if (!cluster_->listen_until([&] { return cluster_->result(request).over(); }))
      return fail(Code::deadline, "the first request of all is not over");
    const ServedResult& result = cluster_->result(request);
    for (const auto& [worker, why] : result.whys)
      if (!why.empty()) return fail(Code::unavailable, "{}: {}", cluster_->workers.spec(worker).name(), why);
    report_.wrong_bytes += result.wrong_bytes;
    cluster_->forget(request);
    return note_state();
  }

  // Of each process that was not looked at since it was started.
  // @pre a request went through everybody since: connections stand, and what peers map is mapped
  Expected<void> note_state() {
    for (const WorkerId worker : cluster_->all()) {
      if (resident_.contains(worker)) continue;
      const auto state = cluster_->workers.ask(worker, {{"do", "state"}});
      if (!state) return tl::unexpected(state.error());
      std::int64_t& most = descriptors_[cluster_->workers.spec(worker).prefill];
      if (report_.kills == 0) most = std::max(most, (*state)["descriptors"].get<std::int64_t>());
      resident_.emplace(worker, (*state)["resident_bytes"].get<std::int64_t>());
    }
    return {};
  }

  void admit() {
    Open open;
    ServedRequest& request = open.request;
    request.name = fmt::format("req-{}", next_);
    request.total = std::clamp<std::int64_t>(lengths_[static_cast<std::size_t>(next_) % lengths_.size()], 1, words_.most_tokens);
    ++next_;
    begin_attempt(open);
    open_.push_back(open);
  }

  void begin_attempt(Open& open) {
    ServedRequest& request = open.request;
    request.number = next_number_++;
    request.prefix = chance(40) ? draw(0, request.total) : 0;
    request.payload = chance(20) ? draw(1, 4096) : 0;
    request.time_ms = 20'000;
    open.chunk = draw(1, std::max<std::int64_t>(1, request.total));
    open.done = 0;
    open.offered = open.begun = open.all_computed = open.cancelled = open.orphaned = false;
    open.source_first = chance(50);
    open.cancel_at = chance(words_.cancel_percent) ? draw(0, request.total) : -1;
    open.by_decode = chance(50);
    ++report_.attempts;
  }

  // The next thing that happens to one of the open requests.
  Expected<void> step() {
    Open& open = open_[static_cast<std::size_t>(draw(0, static_cast<std::int64_t>(open_.size()) - 1))];
    const ServedRequest& request = open.request;
    if (!open.all_computed) open.told_at = std::chrono::steady_clock::now();
    if (!open.offered && (open.source_first || open.begun)) {
      open.offered = true;
      return cluster_->offer(request);
    }
    if (!open.begun && (!open.source_first || chance(50))) {
      open.begun = true;
      return cluster_->begin(request);
    }
    if (open.cancel_at >= 0 && open.done >= open.cancel_at && !open.cancelled && open.offered && open.begun) {
      open.cancelled = true;
      return cluster_->cancel(request, open.by_decode, open.by_decode ? "its user left" : "preempted");
    }
    if (!open.offered || open.all_computed) {
      cluster_->listen(std::chrono::milliseconds(open.all_computed ? 1 : 0));
      return {};
    }
    // A prefix that prefill has already is there at once.
    const std::int64_t begin = open.done;
    open.done = std::min(request.total, begin + open.chunk);
    open.all_computed = open.done == request.total;
    return cluster_->compute(request, begin, open.done);
  }

  // Requests that are over: counted; what failed through no will of ours is tried again.
  Expected<void> settle() {
    for (std::size_t i = 0; i < open_.size();) {
      Open& open = open_[i];
      const ServedResult& result = cluster_->result(open.request);
      if (!open.offered || !open.begun || !result.over()) {
        if (auto ok = cancel_if_late(open); !ok) return ok;
        ++i;
        continue;
      }
      report_.wrong_bytes += result.wrong_bytes;
      report_.bytes += result.bytes;
      const bool landed = result.landed();
      cluster_->forget(open.request);
      if (landed && open.request.number >= first_since_kill_)
        if (auto ok = note_state(); !ok) return ok;
      if (landed || open.cancelled) {
        ++(landed ? report_.landed : report_.cancelled);
        open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(i));
        ++over_;
        show();
        continue;
      }
      ++report_.failed;
      if (++open.request.epoch > kMostAttempts) {
        ++report_.lost.requests;
        open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(i));
        continue;
      }
      begin_attempt(open);
      ++i;
    }
    return {};
  }

  Expected<void> kill_now_and_then() {
    if (words_.kill_every <= 0 || over_ < (report_.kills + 1) * words_.kill_every || over_ >= words_.requests) return {};
    const auto all = cluster_->all();
    const WorkerId victim = all[static_cast<std::size_t>(draw(0, static_cast<std::int64_t>(all.size()) - 1))];
    cluster_->workers.kill(victim);
    ++report_.kills;
    resident_.erase(victim);
    first_since_kill_ = next_number_;
    if (auto ok = cluster_->restart(victim); !ok) return ok;
    return leave_or_cancel(report_.kills % 2 == 1);
  }

  // The rank that comes back knows nothing of requests that were open, so they are begun anew. Every other time the engine's router says so to
  // the survivors; else they see it by themselves, but for what only one side was told of: that would end with its time only.
  Expected<void> leave_or_cancel(bool leave) {
    for (Open& open : open_) {
      if (!open.offered && !open.begun) continue;
      open.orphaned = leave && open.offered && open.begun;
      open.told_at = std::chrono::steady_clock::now();
      if (open.orphaned) continue;
      if (auto ok = cancel(open); !ok) return ok;
    }
    return {};
  }

  Expected<void> cancel(Open& open) {
    if (open.offered)
      if (auto ok = cluster_->cancel(open.request, false, "a rank died"); !ok) return ok;
    if (open.begun)
      if (auto ok = cluster_->cancel(open.request, true, "a rank died"); !ok) return ok;
    open.offered = open.begun = open.all_computed = true;  // nobody else is told any more
    return {};
  }

  // Now and then that is right: a rank that died in the moment in which it was told has told nobody.
  Expected<void> cancel_if_late(Open& open) {
    if (!open.orphaned || !open.all_computed || std::chrono::steady_clock::now() - open.told_at < kPatience) return {};
    open.orphaned = false;
    ++report_.late;
    return cancel(open);
  }

  Expected<void> count_lost() {
    for (const WorkerId worker : cluster_->all()) {
      const auto state = cluster_->workers.ask(worker, {{"do", "state"}});
      if (!state) return tl::unexpected(state.error());
      report_.lost.pages += (*state)["taken"].get<std::int64_t>();
      report_.wrong_bytes += (*state)["wrong_free_bytes"].get<std::int64_t>();
      report_.lost.descriptors += std::max<std::int64_t>(
          0, (*state)["descriptors"].get<std::int64_t>() - descriptors_[cluster_->workers.spec(worker).prefill]);
      if (const auto at = resident_.find(worker); at != resident_.end())
        report_.grown_bytes = std::max(report_.grown_bytes, (*state)["resident_bytes"].get<std::int64_t>() - at->second);
    }
    return {};
  }

  void show() const {
    if (!context_.err_is_terminal) return;
    fmt::print(context_.err, "\r\x1b[K{} of {} requests", over_, words_.requests);
    std::fflush(context_.err);
  }

  static constexpr std::uint64_t kMostAttempts = 20;

  const SoakWords& words_;
  std::mt19937_64 random_;
  std::vector<std::int64_t> lengths_;
  const Context& context_;
  std::unique_ptr<WorkerCluster> cluster_;
  std::vector<Open> open_;
  std::map<bool, std::int64_t> descriptors_;   // of a prefill, of a decode rank
  std::map<WorkerId, std::int64_t> resident_;  // bytes, after the first request since it was started
  std::int64_t next_ = 0, over_ = 0, next_number_ = 1, meetings_ = 0, first_since_kill_ = 0;
  SoakReport report_;
};

Expected<std::vector<std::int64_t>> lengths(const SoakWords& words, std::mt19937_64& random) {
  std::vector<std::int64_t> out;
  if (words.trace.empty()) {  // as requests are: most are short, some are long
    std::lognormal_distribution<double> length(4.4, 1.1);
    for (std::int64_t i = 0; i < words.requests; ++i) out.push_back(1 + static_cast<std::int64_t>(length(random)));
    return out;
  }
  const auto text = read_file(words.trace);
  if (!text) return tl::unexpected(text.error());
  const auto trace = parse_trace(*text, static_cast<std::size_t>(words.requests), words.trace);
  if (!trace) return tl::unexpected(trace.error());
  for (const TraceRequest& request : *trace) out.push_back(std::max<std::int64_t>(1, request.tokens / words.scale));
  return out;
}

Expected<ExitCode> soak(const SoakWords& words, const Context& context) {
  if (auto ok = check_transport(words.transport); !ok) return tl::unexpected(ok.error());
  const std::uint64_t seed = words.seed >= 0 ? static_cast<std::uint64_t>(words.seed) : std::random_device{}();
  std::mt19937_64 random(seed);
  auto tokens = lengths(words, random);
  if (!tokens) return tl::unexpected(tokens.error());
  if (!words.json)
    fmt::print(context.out, "{} to {} over {}, {} at once, seed {}\n", words.prefill, words.decode, words.transport.name,
               words.at_once, seed);
  if (!words.json && !words.transport.on_host()) fmt::print(context.out, "{}\n", copies_text(words.transport.copies.limits));
  const auto report = Soak(words, seed, std::move(*tokens), context).run();
  if (context.err_is_terminal) fmt::print(context.err, "\r\x1b[K");
  if (!report) return tl::unexpected(report.error());
  if (words.json) {
    json out = {{"transport", words.transport.name},
                {"requests", words.requests},
                {"landed", report->landed},
                {"cancelled", report->cancelled},
                {"attempts", report->attempts},
                {"failed_attempts", report->failed},
                {"kills", report->kills},
                {"bytes", report->bytes},
                {"wrong_bytes", report->wrong_bytes},
                {"lost_pages", report->lost.pages},
                {"lost_descriptors", report->lost.descriptors},
                {"lost_requests", report->lost.requests},
                {"late_attempts", report->late},
                {"grown_bytes", report->grown_bytes},
                {"seconds", report->seconds},
                {"seed", seed}};
    if (!words.transport.on_host()) out["copies"] = copies_json(words.transport.copies.limits);
    fmt::print(context.out, "{}\n", out.dump(2));
  } else {
    fmt::print(context.out,
               "{} landed, {} cancelled, {} ranks killed and started anew, {} attempts failed and were made again; {} moved; the "
               "process "
               "that grew most grew by {}; {:.1f} s\n",
               count_text(report->landed), count_text(report->cancelled), report->kills, count_text(report->failed),
               bytes_text(Bytes(report->bytes)), bytes_text(Bytes(std::max<std::int64_t>(0, report->grown_bytes))),
               report->seconds);
    if (report->lost.requests > 0) fmt::print(context.out, "{} requests never landed\n", report->lost.requests);
    if (report->late > 0)
      fmt::print(context.out, "{} attempts were not ended by the survivors of a rank themselves\n", report->late);
    fmt::print(context.out, "soak: {} requests, {} wrong bytes, {} pages lost, {} descriptors lost\n", words.requests,
               report->wrong_bytes, report->lost.pages, report->lost.descriptors);
  }
  const bool good = report->wrong_bytes == 0 && report->lost.pages == 0 && report->lost.descriptors == 0 &&
                    report->lost.requests == 0 && report->grown_bytes <= kMostGrown && report->late <= report->kills;
  return good ? kFine : kJobFailed;
}

}  // namespace

void add_soak(CLI::App& app, Context& context) {
  auto words = std::make_shared<SoakWords>();
  CLI::App* verb = add_verb(app, context, "soak", "Serve many requests with real processes that die, and check every byte",
                            kSoakExamples, [words, &context] { return soak(*words, context); });
  add_count(*verb, "--requests", words->requests, "that are served", 1, 10'000'000)->capture_default_str();
  add_count(*verb, "--at-once", words->at_once, "requests that are open at a time", 1, 4096)->capture_default_str();
  add_count(*verb, "--seed", words->seed, "of everything that is drawn; drawn and printed where not said", 0);
  add_count(*verb, "--cancel-percent", words->cancel_percent, "of requests, at a random moment", 0, 100)->capture_default_str();
  add_count(*verb, "--kill-every", words->kill_every, "requests a random rank is killed and started anew; 0: none", 0)
      ->capture_default_str();
  add_count(*verb, "--most-tokens", words->most_tokens, "of a request; longer ones are cut", 1, 1 << 20)->capture_default_str();
  add_count(*verb, "--scale", words->scale, "by which lengths of the trace are divided", 1, 1 << 20)->capture_default_str();
  verb->add_option("--prefill", words->prefill, "Sharding words of prefill")->capture_default_str();
  verb->add_option("--decode", words->decode, "Sharding words of decode")->capture_default_str();
  verb->add_option("--trace", words->trace, "Take lengths from this trace (default: drawn, most short, some long)");
  add_transport_options(*verb, words->transport);
  add_log(*verb, words->log);
  verb->add_flag("--json", words->json, "Print JSON");
}

}  // namespace kvloom
