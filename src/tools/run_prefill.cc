#include "kvloom/landing/checksum.h"
#include "kvloom/tools/run_rank.h"
#include "kvloom/tools/run_ranks.h"

namespace kvloom {
namespace {

using nlohmann::json;

class PrefillRank : public RankProcess<SourceEndpoint, SourceEvent> {
 public:
  using RankProcess::RankProcess;

  Expected<void> run() {
    if (auto ok = prepare(); !ok) return ok;
    if (auto ok = parent_.send({{"say", "ready"}, {"address", endpoint_->address()}}); !ok) return ok;
    for (;;) {
      const auto message = next_message();
      if (!message) return tl::unexpected(message.error());
      const std::string say = (*message)["say"];
      Expected<json> answer;
      if (say == "meet")
        answer = push(kMeetStage);
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
  const Plan& plan() const { return job_.loom.plan; }
  RankCache cache() const { return {&plan(), true, rank_, &job_.loom.tables.prefill, job_.tokens}; }

  // The prefill itself: every page of every layer that this rank computes.
  Expected<void> prepare() {
    if (auto ok = open_transport(true); !ok) return ok;
    auto map = TensorMap::make(plan(), true, rank_, job_.loom.tables.prefill);
    if (!map) return tl::unexpected(map.error());
    map_ = std::move(*map);
    std::vector<const Region*> regions;
    if (map_.length() > 0) {
      auto store = transport_.allocate(Bytes(map_.length()));
      if (!store) return tl::unexpected(store.error());
      store_ = std::move(*store);
      regions.push_back(&store_.region());
    }
    for (const Tensor& tensor : map_.tensors()) {
      const bool state = cache().side(tensor.group).kind == GroupKind::state;
      write_rows(cache(), tensor, 0, state ? 1 : job_.tokens, memory(tensor));
    }
    if (auto ok = store_.put_all(); !ok) return ok;
    auto local = LocalCache::make(std::make_shared<const Side>(plan().source()), rank_, regions, map_.placed(plan(), true));
    if (!local) return tl::unexpected(local.error());
    SourceOptions options;
    fill_options(options);
    auto endpoint = SourceEndpoint::make(std::move(options), *transport_, std::move(*local));
    if (!endpoint) return tl::unexpected(endpoint.error());
    endpoint_ = std::move(*endpoint);
    return {};
  }

  std::span<std::byte> memory(const Tensor& tensor) const {
    return store_.memory().subspan(static_cast<std::size_t>(tensor.offset), static_cast<std::size_t>(tensor.length));
  }

  // All layers are computed already: they are told one by one.
  Expected<json> push(int stage) {
    const TransferKey key = stage_key(stage);
    const SourceEndpoint::Counts before = endpoint_->counts();
    if (auto ok = endpoint_->offer({key, kStageTime, false}); !ok) return tl::unexpected(ok.error());
    auto tables = side_tables(plan(), true, rank_, job_.loom.tables.prefill);
    for (std::size_t g = 0; g < tables.size(); ++g)
      if (auto ok = endpoint_->set_table(key, static_cast<std::int32_t>(g), std::move(tables[g])); !ok)
        return tl::unexpected(ok.error());
    std::set<LayerId> layers;
    for (const Tensor& tensor : map_.tensors()) layers.insert(tensor.layer);
    for (const LayerId layer : layers) endpoint_->ready(key, layer, job_.tokens);
    for (;;)
      for (const SourceEvent& event : poll()) {
        const auto* ended = std::get_if<SourceEnded>(&event);
        if (ended == nullptr || ended->key != key) continue;
        if (ended->outcome != Outcome::landed) return tl::unexpected(ended->why);
        const SourceEndpoint::Counts& now = endpoint_->counts();
        return json{{"say", "sent"},
                    {"bytes", (now.delivered - before.delivered).value},
                    {"posts", now.posts - before.posts},
                    {"runs", now.runs - before.runs}};
      }
  }

  // The checksum of what decode asks for, each replica group once: of what is there after the transfer.
  Expected<json> sum() const {
    if (auto ok = store_.get_all(); !ok) return tl::unexpected(ok.error());
    Checksum all;
    for (const Tensor& tensor : map_.tensors()) {
      const GroupSide& side = cache().side(tensor.group);
      const GroupSide& target = *plan().groups()[static_cast<std::size_t>(tensor.group)].target;
      if (side.places[static_cast<std::size_t>(rank_.value)].replica != 0) continue;
      if (!std::binary_search(target.layers.begin(), target.layers.end(), tensor.layer)) continue;
      const TokenRange range = wanted(target, job_.range());
      all +=
          checksum(side, rank_, tensor.layer, memory(tensor), cache().table(tensor.group), range.begin, range.end, job_.tokens);
    }
    return json{{"say", "sum"}, {"sum", all.sum}, {"rows", all.rows}};
  }

  TensorMap map_;
  RankStore store_;
};

}  // namespace

Expected<void> run_prefill_rank(const RunJob& job, Rank rank, Channel& parent) { return PrefillRank(job, rank, parent).run(); }

}  // namespace kvloom
