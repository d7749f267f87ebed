#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <random>

#include "kvloom/bind/bind.h"
#include "kvloom/landing/checksum.h"
#include "kvloom/tools/run_rank.h"
#include "kvloom/tools/run_ranks.h"
#include "kvloom/transport/copy.h"

namespace kvloom {
namespace {

constexpr std::int64_t kProgressNs = 50'000'000;

class DecodeRank : public RankProcess<TargetEndpoint, TargetEvent> {
 public:
  using RankProcess::RankProcess;

  Expected<void> run() {
    if (auto ok = prepare(); !ok) return ok;
    if (auto ok = parent_.send({{"say", "ready"}}); !ok) return ok;
    for (;;) {
      const auto message = next_message();
      if (!message) return tl::unexpected(message.error());
      const std::string say = (*message)["say"];
      Expected<nlohmann::json> answer;
      if (say == "meet")
        answer = meet((*message)["sources"]);
      else if (say == "go")
        answer = land((*message)["stage"]);
      else if (say == "check")
        answer = check();
      else if (say == "refill")
        answer = refill();
      else if (say == "copy")
        answer = copy((*message)["pages"]);
      else
        return {};  // quit
      if (!answer) return tl::unexpected(answer.error());
      if (auto ok = parent_.send(*answer); !ok) return ok;
    }
  }

 private:
  RankCache cache() const { return {&job_.loom.plan, false, rank_, &job_.loom.tables.decode, job_.tokens}; }

  Expected<void> prepare() {
    if (auto ok = open_transport(false); !ok) return ok;
    TargetOptions options;
    fill_options(options);
    auto endpoint = TargetEndpoint::make(std::move(options), *transport_);
    if (!endpoint) return tl::unexpected(endpoint.error());
    endpoint_ = std::move(*endpoint);
    if (auto ok = open_memory(job_.loom, map_, store_); !ok) return ok;
    if (auto ok = fill(); !ok) return ok;
    if (job_.naive) return open_memory(job_.naive->send, staging_map_, staging_);
    return {};
  }

  Expected<void> fill() {
    fill_canary(cache(), map_, store_.memory());
    return store_.put_all();
  }

  // Each stage is a geometry of its own: another sharding, on other memory.
  Expected<void> open_memory(const Scheme& scheme, TensorMap& map, RankStore& store) {
    auto made = TensorMap::make(scheme.plan, false, rank_, scheme.tables.decode);
    if (!made) return tl::unexpected(made.error());
    map = std::move(*made);
    std::vector<const Region*> regions;
    if (map.length() > 0) {
      auto allocated = transport_.allocate(Bytes(map.length()));
      if (!allocated) return tl::unexpected(allocated.error());
      store = std::move(*allocated);
      regions.push_back(&store.region());
    }
    auto local =
        LocalCache::make(std::make_shared<const Side>(scheme.plan.target()), rank_, regions, map.placed(scheme.plan, false));
    if (!local) return tl::unexpected(local.error());
    const auto geometry = endpoint_->describe(std::move(*local));
    if (!geometry) return tl::unexpected(geometry.error());
    geometries_.push_back(*geometry);
    return {};
  }

  // A transfer of no tokens: everybody is connected after it.
  Expected<nlohmann::json> meet(const nlohmann::json& sources) {
    for (const auto& source : sources) sources_.push_back({source.get<std::string>(), ""});
    return land(kMeetStage);
  }

  Expected<nlohmann::json> land(int stage) {
    const Scheme& scheme = stage == kNaiveStage ? job_.naive->send : job_.loom;
    const TransferKey key = stage_key(stage);
    Want want{key,
              geometries_[stage == kNaiveStage ? 1 : 0],
              sources_,
              stage == kMeetStage ? TokenRange{job_.tokens, job_.tokens} : job_.range(),
              side_tables(scheme.plan, false, rank_, scheme.tables.decode),
              kStageTime};
    if (auto ok = endpoint_->begin(std::move(want)); !ok) return tl::unexpected(ok.error());
    std::int64_t said = now_ns();
    for (;;) {
      for (const TargetEvent& event : poll())
        if (const auto* ended = std::get_if<TargetEnded>(&event); ended != nullptr && ended->key == key) {
          if (ended->outcome != Outcome::landed) return tl::unexpected(ended->why);
          if (stage == kNaiveStage)
            if (auto ok = keep_own_part(); !ok) return tl::unexpected(ok.error());
          return nlohmann::json{{"say", "landed"}, {"bytes", ended->bytes.value}, {"done_at", now_ns()}};
        }
      if (now_ns() - said < kProgressNs) continue;
      said = now_ns();
      if (auto ok = parent_.send({{"say", "progress"}, {"bytes", endpoint_->covered(key).value}}); !ok)
        return tl::unexpected(ok.error());
    }
  }

  // The end of the naive way, in host memory: from the staged whole sequence to this rank's own pages.
  Expected<void> keep_own_part() {
    const Scheme& keep = job_.naive->keep;
    const CopyKernel kernel = best_copy_kernel();
    std::vector<Run> runs(512);
    std::vector<CopyJob> jobs;
    for (std::int32_t g = 0; g < static_cast<std::int32_t>(keep.plan.groups().size()); ++g) {
      const auto path = keep.plan.path(g, Rank(0), rank_);
      if (!path) continue;
      const auto group = static_cast<std::size_t>(g);
      auto bound =
          bind(keep.plan, *path, keep.tables.prefill[group].of(Rank(0)), keep.tables.decode[group].of(rank_), job_.range());
      if (!bound) return tl::unexpected(bound.error());
      for (const LayerId layer : keep.plan.layer_ids(*path)) {
        bound->rewind();
        const std::byte* from = staging_.memory().data() + staging_map_.find(g, layer).offset;
        std::byte* to = store_.memory().data() + map_.find(g, layer).offset;
        while (const std::size_t n = bound->next(runs)) {
          jobs.clear();
          std::int64_t bytes = 0;
          for (std::size_t i = 0; i < n; ++i) {
            jobs.push_back({to, from, runs[i]});
            bytes += runs[i].total().value;
          }
          copy_range(kernel, jobs, 0, bytes);
        }
      }
    }
    return {};
  }

  Expected<nlohmann::json> check() const {
    const auto result = check_memory(cache(), map_, job_.range(), store_);
    if (!result) return tl::unexpected(result.error());
    if (auto ok = store_.get_all(); !ok) return tl::unexpected(ok.error());
    Checksum sum;
    for (const Tensor& tensor : map_.tensors()) {
      const GroupSide& side = cache().side(tensor.group);
      if (side.places[static_cast<std::size_t>(rank_.value)].replica != 0) continue;
      const TokenRange range = wanted(side, job_.range());
      sum += checksum(side, rank_, tensor.layer,
                      store_.memory().subspan(static_cast<std::size_t>(tensor.offset), static_cast<std::size_t>(tensor.length)),
                      cache().table(tensor.group), range.begin, range.end, job_.tokens);
    }
    return nlohmann::json{
        {"say", "checked"}, {"wanted", result->wanted}, {"wrong", result->wrong}, {"sum", sum.sum}, {"rows", sum.rows}};
  }

  Expected<nlohmann::json> refill() {
    if (auto ok = fill(); !ok) return tl::unexpected(ok.error());
    return nlohmann::json{{"say", "ready"}};
  }

  // In host memory: what memcpy does with as many bytes as this rank gets: in one piece, or page by page to the same pages.
  Expected<nlohmann::json> copy(bool pages) {
    if (scratch_.empty()) scratch_.resize(static_cast<std::size_t>(map_.length()), std::byte{1});
    const std::int64_t from = now_ns();
    std::int64_t bytes = 0;
    if (pages) {
      bytes = copy_pages();
    } else {
      std::memcpy(store_.memory().data(), scratch_.data(), scratch_.size());
      bytes = map_.length();
    }
    return nlohmann::json{{"say", "copied"}, {"bytes", bytes}, {"from", from}, {"to", now_ns()}};
  }

  std::int64_t copy_pages() {
    std::int64_t bytes = 0;
    std::minstd_rand random(1);
    for (const Tensor& tensor : map_.tensors()) {
      const GroupSide& side = cache().side(tensor.group);
      const auto table = cache().table(tensor.group);
      const std::int64_t stride = side.layout.page_stride(), pages = tensor.length / stride;
      const std::int64_t parts = side.tokens.rule == TokenRule::value ? side.tokens.parts : 1;
      for (const PageId page : table) {
        const std::int64_t to = page.value / parts, source = static_cast<std::int64_t>(random()) % pages;
        std::memcpy(store_.memory().data() + tensor.offset + to * stride, scratch_.data() + tensor.offset + source * stride,
                    static_cast<std::size_t>(stride));
        bytes += stride;
      }
    }
    return bytes;
  }

  TensorMap map_, staging_map_;
  RankStore store_, staging_;
  std::vector<GeometryId> geometries_;  // of store_ and staging_
  std::vector<SourceAddress> sources_;
  std::vector<std::byte> scratch_;
};

}  // namespace

Expected<void> run_decode_rank(const RunJob& job, Rank rank, Channel& parent) { return DecodeRank(job, rank, parent).run(); }

}  // namespace kvloom
