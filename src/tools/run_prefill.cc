#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <unordered_map>

#include "kvloom/bind/bind.h"
#include "kvloom/landing/checksum.h"
#include "kvloom/tools/run_rank.h"
#include "kvloom/tools/run_ranks.h"

namespace kvloom {
namespace {

constexpr std::size_t kRunsAPost = 512;
constexpr std::size_t kOpenPosts = 256;

// A decode rank as this rank sees it.
struct Target {
  Rank rank;
  PeerId peer;
  bool up = false;
};

// Where a target's tensors lie, for one stage.
struct TargetMemory {
  RemoteRegion region;
  TensorMap map;
};

// One path of a stage, bound.
struct BoundWork {
  std::size_t target = 0;  // index of targets_
  std::int32_t group = 0;
  std::vector<LayerId> layers;
  BoundPath path;
};

class PrefillRank : public RankProcess {
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
      if (say == "peers")
        answer = connect((*message)["targets"]);
      else if (say == "meet")
        answer = meet();
      else if (say == "go")
        answer = push((*message)["stage"]);
      else if (say == "sum")
        answer = sum();
      else
        return {};  // quit
      if (!answer) return tl::unexpected(answer.error());
      if (auto ok = parent_.send(*answer); !ok) return ok;
    }
  }

 private:
  RankCache cache() const { return {&job_.loom.plan, true, rank_, &job_.loom.tables.prefill, job_.tokens}; }

  // The prefill itself: every page of every layer that this rank computes.
  Expected<void> prepare() {
    if (auto ok = open_transport(false); !ok) return ok;
    auto map = TensorMap::make(job_.loom.plan, true, rank_, job_.loom.tables.prefill);
    if (!map) return tl::unexpected(map.error());
    map_ = std::move(*map);
    if (map_.length() == 0) return {};
    auto region = transport_->allocate(Bytes(map_.length()));
    if (!region) return tl::unexpected(region.error());
    region_ = std::move(*region);
    for (const Tensor& tensor : map_.tensors()) {
      const bool state = cache().side(tensor.group).kind == GroupKind::state;
      write_rows(cache(), tensor, 0, state ? 1 : job_.tokens, memory(tensor));
    }
    return {};
  }

  std::span<std::byte> memory(const Tensor& tensor) const {
    return region_.memory().subspan(static_cast<std::size_t>(tensor.offset), static_cast<std::size_t>(tensor.length));
  }

  // [{rank, address, keys: [of each stage]}], those that are linked to this rank.
  Expected<nlohmann::json> connect(const nlohmann::json& targets) {
    for (const auto& target : targets) {
      const auto peer = transport_->connect(target["address"].get<std::string>());
      if (!peer) return tl::unexpected(peer.error());
      targets_.push_back({Rank(target["rank"].get<std::int32_t>()), *peer, false});
    }
    while (!std::all_of(targets_.begin(), targets_.end(), [](const Target& t) { return t.up; }))
      for (const Event& event : poll())
        if (auto ok = handle(event); !ok) return tl::unexpected(ok.error());
    for (std::size_t stage = 0; stage < (job_.naive ? 2U : 1U); ++stage) {
      const Scheme& scheme = stage == kLoomStage ? job_.loom : job_.naive->send;
      for (std::size_t i = 0; i < targets_.size(); ++i) {
        auto map = TensorMap::make(scheme.plan, false, targets_[i].rank, scheme.tables.decode);
        if (!map) return tl::unexpected(map.error());
        const std::string key = targets[i]["keys"][stage];
        if (key.empty()) {  // the target holds nothing
          memories_[stage].push_back({{}, std::move(*map)});
          continue;
        }
        auto region = transport_->import_region(targets_[i].peer, from_hex(key));
        if (!region) return tl::unexpected(region.error());
        memories_[stage].push_back({*region, std::move(*map)});
      }
    }
    return nlohmann::json{{"say", "connected"}};
  }

  // An empty write to every target: so each maps this rank's memory now, once for as long as they are connected, and not in the first transfer.
  Expected<nlohmann::json> meet() {
    for (std::size_t i = 0; i < targets_.size(); ++i) {
      if (!region_ || memories_[kLoomStage][i].region.length == Bytes(0)) continue;
      const PostId post = transport_->write({region_.id(), memories_[kLoomStage][i].region, tag_of(kLoomStage), {}});
      open_.emplace(post.value, std::vector<Run>());
    }
    if (auto ok = drain(0); !ok) return tl::unexpected(ok.error());
    return nlohmann::json{{"say", "met"}};
  }

  Expected<void> handle(const Event& event) {
    if (const auto* up = std::get_if<PeerUp>(&event)) {
      for (Target& target : targets_) target.up = target.up || target.peer == up->peer;
    } else if (const auto* down = std::get_if<PeerDown>(&event)) {
      return tl::unexpected(down->reason);
    } else if (const auto* done = std::get_if<Completed>(&event)) {
      if (!done->delivered) return tl::unexpected(done->delivered.error());
      if (const auto at = open_.find(done->post.value); at != open_.end()) {
        delivered_ += *done->delivered;
        spare_.push_back(std::move(at->second));
        open_.erase(at);
      } else {
        --notices_;
      }
    }
    return {};
  }

  // Lets posts finish until at most `most` are open.
  Expected<void> drain(std::size_t most) {
    while (open_.size() + notices_ > most)
      for (const Event& event : poll())
        if (auto ok = handle(event); !ok) return ok;
    return {};
  }

  Expected<std::vector<BoundWork>> bind_all(const Scheme& scheme) const {
    std::vector<BoundWork> out;
    for (std::size_t i = 0; i < targets_.size(); ++i)
      for (std::int32_t g = 0; g < static_cast<std::int32_t>(scheme.plan.groups().size()); ++g) {
        const auto path = scheme.plan.path(g, rank_, targets_[i].rank);
        if (!path) continue;
        const auto group = static_cast<std::size_t>(g);
        auto bound = bind(scheme.plan, *path, scheme.tables.prefill[group].of(rank_),
                          scheme.tables.decode[group].of(targets_[i].rank), job_.range());
        if (!bound) return tl::unexpected(bound.error());
        if (bound->bytes() > Bytes(0)) out.push_back({i, g, scheme.plan.layer_ids(*path), std::move(*bound)});
      }
    return out;
  }

  // Layer by layer, and within a layer target by target, each rank beginning with another one.
  Expected<nlohmann::json> push(int stage) {
    const Scheme& scheme = stage == kLoomStage ? job_.loom : job_.naive->send;
    auto works = bind_all(scheme);
    if (!works) return tl::unexpected(works.error());
    delivered_ = Bytes(0);
    posts_ = runs_ = 0;
    std::map<LayerId, std::vector<BoundWork*>> by_layer;
    for (BoundWork& work : *works)
      for (const LayerId layer : work.layers) by_layer[layer].push_back(&work);
    for (auto& [layer, all] : by_layer) {
      const auto first = static_cast<std::ptrdiff_t>(static_cast<std::size_t>(rank_.value) % all.size());
      std::rotate(all.begin(), all.begin() + first, all.end());
      for (BoundWork* work : all)
        if (auto ok = push_layer(stage, *work, layer); !ok) return tl::unexpected(ok.error());
    }
    if (auto ok = drain(0); !ok) return tl::unexpected(ok.error());
    return nlohmann::json{{"say", "sent"}, {"bytes", delivered_.value}, {"posts", posts_}, {"runs", runs_}};
  }

  Expected<void> push_layer(int stage, BoundWork& work, LayerId layer) {
    const Target& target = targets_[work.target];
    const TargetMemory& memory = memories_[static_cast<std::size_t>(stage)][work.target];
    const Bytes from(map_.find(work.group, layer).offset), to(memory.map.find(work.group, layer).offset);
    work.path.rewind();
    for (;;) {
      std::vector<Run> runs = take_spare();
      runs.resize(work.path.next(runs));
      if (runs.empty()) break;
      for (Run& run : runs) {
        run.source_offset += from;
        run.target_offset += to;
      }
      ++posts_;
      runs_ += static_cast<std::int64_t>(runs.size());
      if (auto ok = drain(kOpenPosts); !ok) return ok;
      const std::span<const Run> lent = runs;  // stays where it is while the vector is moved
      const PostId post = transport_->write({region_.id(), memory.region, tag_of(stage), lent});
      open_.emplace(post.value, std::move(runs));
    }
    const LayerNotice notice{rank_.value, work.group, layer.value, stage, work.path.bytes().value};
    ++notices_;
    transport_->notify(target.peer, tag_of(stage), std::as_bytes(std::span(&notice, 1)));
    return {};
  }

  std::vector<Run> take_spare() {
    std::vector<Run> runs;
    if (!spare_.empty()) {
      runs = std::move(spare_.back());
      spare_.pop_back();
    }
    runs.resize(kRunsAPost);
    return runs;
  }

  // The checksum of what decode asks for, each replica group once.
  Expected<nlohmann::json> sum() const {
    Checksum all;
    for (const Tensor& tensor : map_.tensors()) {
      const GroupSide& side = cache().side(tensor.group);
      const GroupSide& target = *job_.loom.plan.groups()[static_cast<std::size_t>(tensor.group)].target;
      if (side.places[static_cast<std::size_t>(rank_.value)].replica != 0) continue;
      if (!std::binary_search(target.layers.begin(), target.layers.end(), tensor.layer)) continue;
      const TokenRange range = wanted(target, job_.range());
      all +=
          checksum(side, rank_, tensor.layer, memory(tensor), cache().table(tensor.group), range.begin, range.end, job_.tokens);
    }
    return nlohmann::json{{"say", "sum"}, {"sum", all.sum}, {"rows", all.rows}};
  }

  TensorMap map_;
  Region region_;
  std::vector<Target> targets_;
  std::vector<TargetMemory> memories_[2];                     // [stages][targets_]
  std::unordered_map<std::uint64_t, std::vector<Run>> open_;  // writes that are under way, with the runs that they were lent
  std::vector<std::vector<Run>> spare_;
  std::size_t notices_ = 0;
  Bytes delivered_;
  std::int64_t posts_ = 0, runs_ = 0;
};

}  // namespace

Expected<void> run_prefill_rank(const RunJob& job, Rank rank, Channel& parent) { return PrefillRank(job, rank, parent).run(); }

}  // namespace kvloom
