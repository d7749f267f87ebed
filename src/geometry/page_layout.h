// page_layout.h: where in a page a plane's bytes lie.  Stage: describe.  Part of the sentence: "... to a byte in a region of a rank".
// Law (check_page_layout): byte x of (page, slot, head, plane) stands at
//   page * page_stride + offset + slot * token_stride + head * head_stride + x                                  contiguous content
//   page * page_stride + offset + slot * token_stride + head * head_stride + x / element * content_stride + x % element   strided content
// from the start of the rank's tensor of (group, layer); no two of one page are the same byte.
// Values only. All numbers in bytes, but slots, heads (local to the rank) and page_tokens.
// Source of the named layouts: vLLM's [L, B, H, N, C] orders LBNHC (NHD) and LBHNC (HND); its CPU back end keeps K as [head_dim, tokens]
// inside a page; SGLang's DSA index page is all keys, then all scales.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/geometry/cache_shape.h"

namespace kvloom {

struct PlaneLayout {
  std::string name;
  std::int64_t offset = 0;  // of (slot 0, head 0) from the page's start; past page_stride where the plane is a tensor of its own
  std::int64_t token_stride = 0;    // slot to slot
  std::int64_t head_stride = 0;     // head to head
  std::int64_t bytes = 0;           // per slot and head
  std::int64_t content_stride = 0;  // element to element; 0: the content is contiguous
  std::int64_t element_bytes = 1;   // only read where content_stride is not 0

  // From the page's start to the byte.
  std::int64_t at(std::int64_t slot, std::int64_t head, std::int64_t byte) const {
    const std::int64_t content = content_stride == 0 ? byte : byte / element_bytes * content_stride + byte % element_bytes;
    return offset + slot * token_stride + head * head_stride + content;
  }
  friend bool operator==(const PlaneLayout&, const PlaneLayout&) = default;
};

// How a page orders (token, head, content).
enum class PageOrder : std::uint8_t {
  nhd,  // each plane by itself: [tokens, heads, content]. One plane of one head is MLA; keys and scales make the DSA index page
  hnd,  // each plane by itself: [heads, tokens, content]
  packed_nhd,  // planes joined in the content: [tokens, heads, k|v]
  packed_hnd,  // planes joined in the content: [heads, tokens, k|v]
  cpu,         // [heads, (k as [content, tokens]) | (v as [tokens, content])]: the first plane's content is strided
};

// "nhd", "hnd", "packed-nhd", "packed-hnd", "cpu"; "mla" and "dsa-index" are other names of nhd.
Expected<PageOrder> parse_page_order(std::string_view text);
const char* to_string(PageOrder order);

class PageLayout {
 public:
  // `heads`: those that one rank holds.  page_stride 0: as tight as can be.
  // @error a page of no tokens, a stride below the page, more than 2^20 tokens or 2^24 pieces a page, products over 63 bits
  static Expected<PageLayout> make(PageOrder order, const CacheGroup& group, std::int64_t heads, std::int64_t page_tokens,
                                   std::int64_t page_stride = 0);
  // Any strides of a [layers, blocks, heads, tokens, content] tensor whose content joins the planes: strides in bytes.
  static Expected<PageLayout> strided(const CacheGroup& group, std::int64_t heads, std::int64_t page_tokens,
                                      std::int64_t block_stride, std::int64_t head_stride, std::int64_t token_stride,
                                      std::int64_t content_stride);
  // Any planes at all.  @error two bytes of one page that would be the same, or a plane that reaches past its page
  static Expected<PageLayout> planes(std::int64_t heads, std::int64_t page_tokens, std::int64_t page_stride,
                                     std::vector<PlaneLayout> planes);

  std::int64_t heads() const { return heads_; }
  std::int64_t page_tokens() const { return page_tokens_; }
  std::int64_t page_stride() const { return page_stride_; }
  const std::vector<PlaneLayout>& planes() const { return planes_; }
  // Bytes that one page holds of this rank's data, padding not counted.
  std::int64_t payload() const;

  friend bool operator==(const PageLayout&, const PageLayout&) = default;

 private:
  std::int64_t heads_ = 0;
  std::int64_t page_tokens_ = 0;
  std::int64_t page_stride_ = 0;
  std::vector<PlaneLayout> planes_;
};

}  // namespace kvloom
