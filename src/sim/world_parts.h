// world_parts.h: what a World is made of.  Only for world*.cc.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <vector>

#include "kvloom/sim/world.h"

namespace kvloom::sim {

inline constexpr std::int64_t kMicro = 1000, kMilli = 1000 * kMicro;  // nanoseconds

// What one rank's engine keeps of one attempt.
struct World::Attempt {
  TransferKey key;
  std::size_t request = 0;
  std::int64_t number = 0;                  // of the attempt: whose bytes
  std::vector<std::vector<PageId>> tables;  // [groups]
  std::vector<PageTable> bound;             // [groups], of a source: as far as it has grown
  std::set<LayerId> released_layers;
  std::int64_t begun = 0, time = 0;  // global; its time in local nanoseconds
  bool ended = false, released = false, landed = false;
  bool gets_payload = false;  // of a target: source rank 0 grants it
};

struct World::Node {
  bool source = false;
  std::size_t cluster = 0;
  Rank rank;
  PartnerId id;
  bool dead = false, was_frozen = false;
  std::int64_t frozen_until = 0, wake_at = INT64_MAX;
  double rate = 1;
  std::int64_t offset = 0;
  std::unique_ptr<SourceBook> from;
  std::unique_ptr<TargetBook> to;
  std::unique_ptr<Cache> cache;
  std::map<TransferKey, Attempt> attempts;
  std::set<std::pair<PartnerId, Tag>> admitted;
};

struct SharedTable {
  std::vector<PageId> pages;
  int ranks = 0;  // that still use it
};

struct World::Cluster {
  std::shared_ptr<const Side> side;  // shared with its plans
  std::size_t first = 0;             // of its nodes; [ranks]
  // Groups whose pages have ranks by value: one pool and one table of a request for all ranks of the side.
  std::vector<std::shared_ptr<Pool>> shared;  // [groups]; owners: the caches
  std::map<std::pair<TransferKey, std::size_t>, SharedTable> tables;
  bool one_allocator = false;  // such a group is there: then no rank can die alone
};

struct World::Request {
  std::size_t decode = 0;  // which decode group
  std::int64_t tokens = 0, prefix = 0, hit = 0, chunk = 0;
  std::int64_t begins = 0;
  std::int64_t attempts = 0;
  std::int32_t over = 0;  // ranks of the attempt that have released
  bool all_landed = true, payload = false;
};

struct World::Operation {
  std::size_t source = 0, target = 0;  // nodes
  PartnerId source_id, target_id;
  TransferKey key;
  SendId id;
  Tag tag;
  struct Piece {
    std::size_t group;
    LayerId layer;
    std::int64_t from, to, bytes;
  };
  std::vector<Piece> pieces;
  std::vector<std::byte> notice;
  std::size_t left = 0;
  bool over = false, hangs = false;
  bool there = false;  // all bytes are visible: its notice may follow those of the posts before it
};

}  // namespace kvloom::sim
