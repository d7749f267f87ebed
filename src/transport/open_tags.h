// open_tags.h: the law "a notice never outlives a write of its tag that failed", for the source side of any transport.  Stage:
// carry. A tag is broken from its first failure until nothing with it is open any more: from then on its owner has been told of
// all of them.
// @cost O(1) per operation; memory only for tags with open operations
#pragma once

#include <cstdint>
#include <unordered_map>

#include "kvloom/transport/transport.h"

namespace kvloom {

class OpenTags {
 public:
  void open(Tag tag) { ++tags_[tag.value].open; }
  void break_tag(Tag tag) { tags_[tag.value].broken = true; }  // @pre something with it is open

  // Ends one operation.  @pre it was opened
  void close(Tag tag, bool delivered) {
    const auto found = tags_.find(tag.value);
    found->second.broken |= !delivered;
    if (--found->second.open == 0) tags_.erase(found);
  }

  bool empty() const { return tags_.empty(); }

  bool broken(Tag tag) const {
    const auto found = tags_.find(tag.value);
    return found != tags_.end() && found->second.broken;
  }

  static Error error(Tag tag) {
    return {Code::cancelled, Scope::transfer, fmt::format("an operation with tag {} that was posted before failed", tag.value)};
  }

 private:
  struct Open {
    std::uint64_t open = 0;
    bool broken = false;
  };
  std::unordered_map<std::uint64_t, Open> tags_;
};

}  // namespace kvloom
