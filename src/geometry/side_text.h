// side_text.h: a side as text that people read and diff, and that reads back.  Stage: describe.
// Law (check_side_text): parse_side(to_string(side)) prints the same, and no other text is accepted. Only the lines `words`,
// `page`, `model`, `group`, `layout` and `plane` are read; the rest follows from them, is there for people, and must be as we
// would write it.
//
//   kvloom side 1
//   words cp=8:layers                                          the sharding words
//   page 64                                                    where the words say none
//   model 78 layers "glm-5.2"
//   group index_k paged layers 0-2,6-74/4 heads 1 planes keys:128:1,scales:4:4     name:bytes:element; then `window sliding:4096`
//     layout page 64 stride 8448                               or `absent`
//     plane keys offset 0 token 128 head 128 bytes 128 content 0 element 1         all in bytes
//     parts layers 0+3 3+2 ...                                 each axis' parts, in order; layers by ordinal in the group's list
//     parts heads 0+1
//     parts tokens all | 4 cyclic 64 | 4 blocked | 4 zigzag | 4 value
//     place 0.0.0 ranks 0-7                                    part of layers, heads, tokens; its ranks, by replica
//   digest 0123456789abcdef0123456789abcdef                    of all lines before
#pragma once

#include <string>
#include <string_view>

#include "kvloom/base/error.h"
#include "kvloom/geometry/side.h"

namespace kvloom {

inline constexpr std::size_t kMaxTextBytes = std::size_t{1} << 22;  // of a text that is read

std::string to_string(const Side& side);

// @error parse: the line's number, what stands there and what was expected; exhausted: too much of anything
//        (geometry/side_values.h); what the factories refuse, with the line or the sharding words that are wrong
Expected<Side> parse_side(std::string_view text);

// 128 bits of XXH3 over the text form, 32 hex digits: what two peers compare.
std::string digest(const Side& side);

}  // namespace kvloom
