// cache_shape.h: which caches a model has.  Stage: describe.  Part of the sentence: the coordinate (layer, token, head, plane byte).
// A model's cache is a list of groups. In one group every layer has the same heads and the same planes, so one address formula serves all.
// Values only. Units: bytes are per token and head (paged groups) or per request and head (state groups).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kvloom/base/error.h"
#include "kvloom/base/units.h"

namespace kvloom {

enum class GroupKind : std::uint8_t {
  paged,  // one row a token, in pages found by a page table
  state,  // one row a request (Mamba, GDN, KDA): the token axis has the single index 0
};

// What attention still reads of a group when the next token comes.
struct Window {
  enum class Kind : std::uint8_t {
    sliding,  // the last `tokens` tokens
    chunked,  // the tokens since the last multiple of `tokens` (Llama 4's attention_chunk_size)
  };
  Kind kind = Kind::sliding;
  std::int64_t tokens = 0;  // > 0

  friend bool operator==(const Window&, const Window&) = default;
};

// One of the parts that a token's row is made of: k and v; latent; index keys and their scales.
struct PlaneShape {
  std::string name;                // unique within the group
  std::int64_t bytes = 0;          // per token and head
  std::int64_t element_bytes = 1;  // of one content element; divides `bytes`. Only layouts that stride the content need it.

  friend bool operator==(const PlaneShape&, const PlaneShape&) = default;
};

struct CacheGroup {
  std::string name;  // [a-z][a-z0-9_]*, unique within the model
  GroupKind kind = GroupKind::paged;
  std::vector<LayerId> layers;  // global ids, ascending; only layers that own such a cache (not those that share another's)
  std::int32_t heads = 1;       // KV heads (1 for MLA), or the heads of a state
  std::vector<PlaneShape> planes;
  std::optional<Window> window;  // paged only
  std::string note;  // for people: where the shape comes from, e.g. "[64 heads, 128, 128] f32 per request"; may be empty

  // Bytes of one layer for one token (paged) or one request (state), all heads.
  Bytes row_bytes() const;
  friend bool operator==(const CacheGroup&, const CacheGroup&) = default;
};

// @error says which group breaks which rule: names, at least one plane, positive sizes, ascending layers, element_bytes that divides bytes.
class CacheShape {
 public:
  // `layers`: the model's own layers, num_hidden_layers, draft layers not counted; draft layers have ids from `layers` up.
  static Expected<CacheShape> make(std::string model, std::int32_t layers, std::vector<CacheGroup> groups);

  const std::string& model() const { return model_; }
  std::int32_t layers() const { return layers_; }
  const std::vector<CacheGroup>& groups() const { return groups_; }
  const CacheGroup* find(const std::string& group) const;

  // Over all layers and heads, nothing sharded or replicated.
  Bytes bytes_per_token() const;    // paged groups
  Bytes bytes_per_request() const;  // state groups

  friend bool operator==(const CacheShape&, const CacheShape&) = default;

 private:
  std::string model_;
  std::int32_t layers_ = 0;
  std::vector<CacheGroup> groups_;
};

}  // namespace kvloom
