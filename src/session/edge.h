// edge.h: the edges of a state machine as a table: what `advance` may do, what docs/protocol.md prints, what tests and the simulator count.
// Stage: stream.  Values only.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace kvloom {

// On `on` in state `from` the machine goes to `to`; `what` it does on the way, for people.
template <class State, class On>
struct Edge {
  State from;
  On on;
  State to;
  std::string_view what;
};

// How often each edge was walked, by its index in the machine's table; one more at the end for those that the table does not have.
using EdgeCounts = std::vector<std::uint64_t>;

// @pre the edge is in the table: a machine never does what its table does not have
template <class State, class On>
void count_edge(std::span<const Edge<State, On>> table, State from, On on, State to, EdgeCounts* counts) {
  for (std::size_t i = 0; i < table.size(); ++i)
    if (table[i].from == from && table[i].on == on && table[i].to == to) {
      if (counts == nullptr) return;
      counts->resize(table.size() + 1);
      ++(*counts)[i];
      return;
    }
  assert(counts != nullptr && "an edge that the table does not have");
  if (counts == nullptr) return;
  counts->resize(table.size() + 1);
  ++counts->back();
}

}  // namespace kvloom
