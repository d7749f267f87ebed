// The posts of a source endpoint: what its book says, the queue of the pacer, writes and the notices behind them.
#include <algorithm>

#include "kvloom/bind/bind.h"
#include "kvloom/session/source_endpoint.h"

namespace kvloom {
namespace {

constexpr std::size_t kRunsAWrite = 512;

std::int32_t group_index(const Side& side, const GroupSide* group) {
  return static_cast<std::int32_t>(group - side.groups().data());
}

}  // namespace

// ---- what the book says ----

void SourceEndpoint::obey(std::vector<SourceBook::Action>& actions) {
  for (SourceBook::Action& action : actions) {
    if (const auto* message = std::get_if<SendTo>(&action)) {
      if (const auto* failed = std::get_if<Failed>(&message->message))
        drop_posts(failed->key, message->to, "the transfer has failed");  // it is told that nothing more is posted
      if (Link* link = find(message->to); link != nullptr) say(*link, message->message);
    } else {
      auto& keyed = std::get<SourceBook::Keyed>(action);
      obey(keyed.key, keyed.action);
    }
  }
}

void SourceEndpoint::obey(const TransferKey& key, Sender::Action& action) {
  if (auto* post = std::get_if<Sender::Post>(&action)) return queue(key, std::move(*post));
  if (const auto* fence = std::get_if<Sender::FenceOff>(&action)) {
    // The connection with it, and so its other transfers: a peer that does not answer for so long has none that go on.
    return lose(fence->partner, lost("posts to it do not end"));
  }
  if (const auto* layer = std::get_if<Sender::ReleaseLayer>(&action)) {
    happened_.emplace_back(LayerReleased{key, layer->layer});
    return;
  }
  if (auto* end = std::get_if<Sender::End>(&action)) {
    const auto tail = now() - transfers_.at(key).last_ready;
    telemetry_.ended(key, end->outcome, end->why, now());
    if (end->outcome == Outcome::landed) telemetry_.tail(tail);
    happened_.emplace_back(SourceEnded{key, end->outcome, std::move(end->why), now(), tail});
    return;
  }
  transfers_.erase(key);
  telemetry_.released(key, now());
  for (auto& [route, link] : links_) link.granted.erase(key);
  happened_.emplace_back(SourceReleased{key});
}

// ---- posting ----

void SourceEndpoint::queue(const TransferKey& key, Sender::Post post) {
  const Instant here = now();
  pacer_.push({post.to, key, post.id, post.bytes, here});
  if (pacer_.waiting() > 1 || !pacer_.next(here)) {
    waiting_.emplace(std::pair(key, post.id), std::move(post));
    return;
  }
  telemetry_.left_queue(std::chrono::nanoseconds(0));  // nobody waits: it goes at once
  this->post(key, post);
}

void SourceEndpoint::drop_posts(const TransferKey& key, std::optional<PartnerId> to, const char* why) {
  for (Paced& paced : to ? pacer_.drop(*to, key) : pacer_.drop(key)) {
    waiting_.erase({paced.key, paced.id});
    done_.push_back({std::move(paced.key), paced.id, fail(Scope::transfer, Code::cancelled, "{}", why)});
  }
}

bool SourceEndpoint::let_posts_go() {
  bool did = false;
  while (const auto paced = pacer_.next(now())) {
    const auto at = waiting_.find({paced->key, paced->id});
    const Sender::Post next = std::move(at->second);
    waiting_.erase(at);
    telemetry_.left_queue(now() - paced->pushed);
    post(paced->key, next);
    did = true;
  }
  return did;
}

void SourceEndpoint::post(const TransferKey& key, const Sender::Post& post) {
  const std::uint64_t number = next_open_++;
  ++counts_.posts;
  OpenPost& open = open_[number];
  open.key = key;
  open.id = post.id;
  open.to = post.to;
  open.post = {post.target, {}, post.bytes, now()};
  if (!post.parts.empty()) open.post.first = post.parts.front();
  Link* link = find(post.to);
  const auto transfer = transfers_.find(key);
  if (link == nullptr)
    open.error = lost("the connection is lost");
  else if (transfer == transfers_.end())
    open.error = {Code::cancelled, Scope::transfer, "the transfer is over"};
  else if (auto ok = write_all(post, transfer->second, *link, number); !ok)
    open.error = ok.error();
  if (open.open == 0) finish(number);
}

// The tables of a grant, each checked once, by whoever posts to it first.
Expected<const std::vector<PageTable>*> SourceEndpoint::tables_of(Link& link, const TransferKey& key, const Grant& grant) {
  auto& known = link.granted[key].tables;
  if (const auto at = known.find(grant.target); at != known.end()) return &at->second;
  std::vector<PageTable> tables;
  for (const GrantTable& table : grant.tables) {
    auto made = PageTable::make(table.pages, table.pool_pages, PageTable::Use::target);
    if (!made) return tl::unexpected(made.error());
    tables.push_back(std::move(*made));
  }
  return &known.emplace(grant.target, std::move(tables)).first->second;
}

Expected<void> SourceEndpoint::write_all(const Sender::Post& post, const Transfer& transfer, Link& link, std::uint64_t number) {
  const auto geometry = link.geometries.find(post.grant->geometry);
  if (geometry == link.geometries.end() || !geometry->second)
    return fail(Scope::transfer, Code::unavailable, "geometry {} of decode rank {} is not known any more",
                post.grant->geometry.value, post.target.value);
  const auto tables = tables_of(link, open_.at(number).key, *post.grant);
  if (!tables) return tl::unexpected(tables.error());
  telemetry_.begin_post();
  Progress progress;
  for (const PostPart& part : post.parts) {
    const auto bytes = write_part(post, part, transfer, **tables, *geometry->second, number);
    if (!bytes)
      return fail(Scope::transfer, bytes.error().code, "layer {} of group {}: {}", part.layer.layer.value, part.layer.group,
                  bytes.error().message);
    progress.parts.push_back({part.layer, *bytes});
    open_.at(number).written += *bytes;
  }
  progress.last = post.last;
  progress.payload = post.payload;
  telemetry_.posted(open_.at(number).key, post, now() - transfer.last_ready, now());
  notify(link.peer, post.grant->tag, std::move(progress), number);
  return {};
}

Expected<Bytes> SourceEndpoint::write_part(const Sender::Post& post, const PostPart& part, const Transfer& transfer,
                                           const std::vector<PageTable>& targets, const RemoteCache& remote,
                                           std::uint64_t number) {
  const Plan& plan = *post.plan;
  const GroupPlan& group = plan.groups()[static_cast<std::size_t>(part.layer.group)];
  const auto path = plan.path(part.layer.group, cache_.rank, post.target);
  const std::int32_t ours = group_index(plan.source(), group.source), theirs = group_index(plan.target(), group.target);
  const PageTable& table = transfer.tables[static_cast<std::size_t>(ours)];
  auto bound = bind(plan, *path, table, targets[static_cast<std::size_t>(part.layer.group)], post.grant->range, part.chunk);
  if (!bound) return tl::unexpected(bound.error());
  const TensorRegions *from = cache_.memory.find(ours, part.layer.layer), *to = remote.memory.find(theirs, part.layer.layer);
  if (from == nullptr || to == nullptr)
    return fail(Code::invalid_argument, "its memory is not described at {}", from == nullptr ? "prefill" : "decode");
  scratch_.resize(kRunsAWrite);
  while (const std::size_t count = bound->next(scratch_)) {
    placed_.clear();
    if (auto ok = place(std::span(scratch_).first(count), *from, *to, placed_); !ok) return tl::unexpected(ok.error());
    write_runs(remote, post.grant->tag, number);
  }
  return bound->bytes();
}

// Runs between the same two regions, as many as stand together, are one write.
void SourceEndpoint::write_runs(const RemoteCache& remote, Tag tag, std::uint64_t number) {
  OpenPost& open = open_.at(number);
  for (std::size_t begin = 0; begin < placed_.size();) {
    const PlacedRun& first = placed_[begin];
    std::vector<Run> runs;
    if (!spare_.empty()) {
      runs = std::move(spare_.back());
      spare_.pop_back();
      runs.clear();
    }
    for (; begin < placed_.size() && runs.size() < kRunsAWrite && placed_[begin].source_region == first.source_region &&
           placed_[begin].target_region == first.target_region;
         ++begin)
      runs.push_back(placed_[begin].run);
    const std::span<const Run> lent = runs;  // stays where it is while the vector is moved
    open.runs.push_back(std::move(runs));
    const PostId id = transport_.write({cache_.regions[static_cast<std::size_t>(first.source_region)],
                                        remote.regions[static_cast<std::size_t>(first.target_region)], tag, lent});
    operations_.emplace(id.value, number);
    ++open.open;
    telemetry_.wrote(lent.size());
    counts_.runs += static_cast<std::int64_t>(lent.size());
  }
}

// Layers of a notice that is longer than the transport takes go in notices before it.
void SourceEndpoint::notify(PeerId peer, Tag tag, Progress progress, std::uint64_t number) {
  const auto most = static_cast<std::size_t>(transport_.abilities().max_notice_bytes.value);
  const auto send = [&](const Progress& notice) {
    const PostId id = transport_.notify(peer, tag, encode_progress(notice));
    operations_.emplace(id.value, number);
    ++open_.at(number).open;
  };
  const std::size_t room = parts_that_fit(progress.payload.size(), most);
  while (progress.parts.size() > room) {
    const std::size_t count = std::min(progress.parts.size(), parts_that_fit(0, most));
    const auto end = progress.parts.begin() + static_cast<std::ptrdiff_t>(count);
    send({{progress.parts.begin(), end}, false, {}});
    progress.parts.erase(progress.parts.begin(), end);
  }
  send(progress);
}

void SourceEndpoint::completed(const Completed& completed) {
  const auto operation = operations_.find(completed.post.value);
  if (operation == operations_.end()) return;
  const std::uint64_t number = operation->second;
  operations_.erase(operation);
  OpenPost& open = open_.at(number);
  if (!completed.delivered && !open.error) open.error = completed.delivered.error();
  if (--open.open == 0) finish(number);
}

void SourceEndpoint::finish(std::uint64_t number) {
  const auto at = open_.find(number);
  OpenPost& open = at->second;
  constexpr std::size_t kSpare = 256;
  for (std::vector<Run>& runs : open.runs)
    if (spare_.size() < kSpare) spare_.push_back(std::move(runs));
  pacer_.done(open.to, open.post.bytes);
  if (!open.error) counts_.delivered += open.written;
  telemetry_.delivered(open.key, open.post, now(), open.error);
  done_.push_back({open.key, open.id, open.error ? Expected<void>(tl::unexpected(*open.error)) : Expected<void>()});
  open_.erase(at);
}

}  // namespace kvloom
