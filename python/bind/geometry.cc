// geometry.cc: describe: a model's caches, sharding words, layouts, sides.  Stage: python.  Values: they are copied, and never change.
#include <nanobind/operators.h>

#include "kvloom/bind/cache_memory.h"
#include "kvloom/geometry/model_config.h"
#include "kvloom/geometry/side.h"
#include "kvloom/geometry/side_text.h"
#include "kvloom/plan/wire.h"
#include "kvloom/tools/print.h"
#include "kvloom/tools/tables.h"
#include "python/bind/bind.h"
#include "python/bind/values.h"

namespace kvloom::python {
namespace {

void bind_shape(nb::module_& m) {
  nb::enum_<GroupKind>(m, "GroupKind", "Whether a cache group has a row a token or a row a request.")
      .value("paged", GroupKind::paged, "one row a token, in pages found by a page table")
      .value("state", GroupKind::state, "one row a request (Mamba, GDN, KDA): the token axis has the single index 0");
  nb::class_<Window> window_class(m, "Window", "What attention still reads of a cache group: `tokens` tokens, by `kind`.");
  nb::enum_<Window::Kind>(window_class, "Kind", "What attention still reads of a group when the next token comes.")
      .value("sliding", Window::Kind::sliding, "the last `tokens` tokens")
      .value("chunked", Window::Kind::chunked, "the tokens since the last multiple of `tokens` (Llama 4's attention_chunk_size)");
  window_class.def(nb::new_([](Window::Kind kind, std::int64_t tokens) {
                     return Window{kind, tokens};
                   }),
                   "kind"_a, "tokens"_a)
      .def_ro("kind", &Window::kind, "Sliding or chunked.")
      .def_ro("tokens", &Window::tokens, "Its length, tokens.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object) -> bool"))
      .def("__hash__", [](const Window& of) { return of.tokens; });
  nb::class_<PlaneShape>(m, "PlaneShape",
                         "One of the parts that a token's row is made of: k and v; latent; index keys and their scales.")
      .def(nb::new_([](std::string name, std::int64_t bytes, std::int64_t element_bytes) {
             return PlaneShape{std::move(name), bytes, element_bytes};
           }),
           "name"_a, "bytes"_a, "element_bytes"_a = 1,
           "`bytes`: per token and head (state groups: per request and head). `element_bytes`: of one content element; divides "
           "`bytes`.")
      .def_ro("name", &PlaneShape::name, "Unique within the group.")
      .def_ro("bytes", &PlaneShape::bytes, "Bytes per token and head.")
      .def_ro("element_bytes", &PlaneShape::element_bytes, "Bytes of one content element.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object) -> bool"))
      .def("__hash__", [](const PlaneShape& of) { return std::hash<std::string>()(of.name); });
  nb::class_<CacheGroup>(m, "CacheGroup",
                         "Layers whose caches have the same heads and planes, so that one address formula serves all.")
      .def(nb::new_([](std::string name, const std::vector<std::int32_t>& layers, std::int32_t heads,
                       std::vector<PlaneShape> planes, GroupKind kind, std::optional<Window> window) {
             return CacheGroup{std::move(name), kind, ids_of<LayerId>(layers), heads, std::move(planes), window, ""};
           }),
           "name"_a, "layers"_a, "heads"_a, "planes"_a, "kind"_a = GroupKind::paged, "window"_a = nb::none(),
           "`layers`: global ids, ascending, of the layers that own such a cache. `heads`: KV heads (1 for MLA). Checked by "
           "CacheShape.")
      .def_ro("name", &CacheGroup::name, "[a-z][a-z0-9_]*, unique within the model.")
      .def_ro("kind", &CacheGroup::kind, "A row a token, or a row a request.")
      .def_prop_ro(
          "layers", [](const CacheGroup& group) { return numbers(group.layers); }, "Global layer ids, ascending.")
      .def_ro("heads", &CacheGroup::heads, "KV heads of the whole group.")
      .def_ro("planes", &CacheGroup::planes, "What a row is made of, in order.")
      .def_ro("window", &CacheGroup::window, "What attention still reads; None: everything.")
      .def_prop_ro(
          "row_bytes", [](const CacheGroup& group) { return group.row_bytes().value; },
          "Bytes of one layer for one token (state: one request), all heads.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object) -> bool"))
      .def("__hash__", [](const CacheGroup& of) { return std::hash<std::string>()(of.name); });
  nb::class_<CacheShape>(m, "CacheShape", "Which caches a model has: a list of cache groups.")
      .def(nb::new_([](std::string model, std::int32_t layers, std::vector<CacheGroup> groups) {
             return take(CacheShape::make(std::move(model), layers, std::move(groups)));
           }),
           "model"_a, "layers"_a, "groups"_a,
           "`layers`: the model's own, draft layers not counted (theirs have ids from `layers` up).\n\n"
           "Raises InvalidArgument: which group breaks which rule.")
      .def_prop_ro("model", &CacheShape::model, "The model's name.")
      .def_prop_ro("layers", &CacheShape::layers, "The model's own layers.")
      .def_prop_ro("groups", &CacheShape::groups, "Its cache groups, in order.")
      .def_prop_ro(
          "bytes_per_token", [](const CacheShape& shape) { return shape.bytes_per_token().value; },
          "Bytes of all paged groups, layers and heads for one token, nothing sharded.")
      .def_prop_ro(
          "bytes_per_request", [](const CacheShape& shape) { return shape.bytes_per_request().value; },
          "Bytes of all state groups for one request.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object) -> bool"))
      .def("__hash__", [](const CacheShape& of) { return of.bytes_per_token().value; })
      .def("__repr__", [](const CacheShape& shape) {
        return fmt::format("<CacheShape {}: {} layers, {} groups, {} B a token>", shape.model(), shape.layers(),
                           shape.groups().size(), shape.bytes_per_token().value);
      });
  m.def(
      "read_model_config",
      [](const std::string& json, const std::string& kv_cache_dtype, const std::string& name) {
        return take(read_model_config(json, take(parse_kv_dtype(kv_cache_dtype)), name));
      },
      "json"_a, "kv_cache_dtype"_a = "auto", "name"_a = "model", WithoutGil(),
      "The caches of a model, from the text of its Hugging Face config.json.\n\n"
      "`kv_cache_dtype`: auto (as the config says), bf16, fp8 or fp8-dsa (DSA rows of 656 B).\n"
      "Raises ParseError: not JSON, with the place. InvalidArgument: a field that is missing or wrong, by its path. Unsupported: "
      "the field, "
      "and why such a cache can't be sharded yet.\nSource of each rule: the field of the config that it reads "
      "(src/geometry/model_config.cc).");
}

void bind_layout(nb::module_& m) {
  nb::class_<PlaneLayout>(m, "PlaneLayout", "Where the bytes of one plane lie in a page. All in bytes.")
      .def(nb::new_([](std::string name, std::int64_t offset, std::int64_t token_stride, std::int64_t head_stride,
                       std::int64_t bytes, std::int64_t content_stride, std::int64_t element_bytes) {
             return PlaneLayout{std::move(name), offset, token_stride, head_stride, bytes, content_stride, element_bytes};
           }),
           "name"_a, "offset"_a, "token_stride"_a, "head_stride"_a, "bytes"_a, "content_stride"_a = 0, "element_bytes"_a = 1,
           "Byte x of (slot, head) stands at offset + slot * token_stride + head * head_stride + x from the page's start; with a "
           "content_stride, at ... + x // element_bytes * content_stride + x % element_bytes.")
      .def_ro("name", &PlaneLayout::name, "As in the group's planes.")
      .def_ro("offset", &PlaneLayout::offset, "Of (slot 0, head 0) from the page's start, bytes.")
      .def_ro("token_stride", &PlaneLayout::token_stride, "From slot to slot, bytes.")
      .def_ro("head_stride", &PlaneLayout::head_stride, "From head to head, bytes.")
      .def_ro("bytes", &PlaneLayout::bytes, "Per slot and head, bytes.")
      .def_ro("content_stride", &PlaneLayout::content_stride, "From element to element, bytes; 0: the content is contiguous.")
      .def_ro("element_bytes", &PlaneLayout::element_bytes, "Of one element, bytes.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object) -> bool"))
      .def("__hash__", [](const PlaneLayout& of) { return std::hash<std::string>()(of.name); });
  nb::class_<PageLayout>(m, "PageLayout", "Where in a page of one rank's tensor of (group, layer) each byte lies.")
      .def_static(
          "make",
          [](const std::string& order, const CacheGroup& group, std::int64_t heads, std::int64_t page_tokens,
             std::int64_t page_stride) {
            return take(PageLayout::make(take(parse_page_order(order)), group, heads, page_tokens, page_stride));
          },
          "order"_a, "group"_a, "heads"_a, "page_tokens"_a, "page_stride"_a = 0,
          "A named order: nhd (also mla, dsa-index), hnd, packed-nhd, packed-hnd, or cpu (vLLM's CPU back end: K as [content, "
          "tokens]).\n\n"
          "`heads`: those that one rank holds. `page_stride`: bytes from page to page, 0: as tight as can be.\n"
          "Raises ParseError, InvalidArgument.")
      .def_static(
          "strided",
          [](const CacheGroup& group, std::int64_t heads, std::int64_t page_tokens, std::int64_t block_stride,
             std::int64_t head_stride, std::int64_t token_stride, std::int64_t content_stride) {
            return take(PageLayout::strided(group, heads, page_tokens, block_stride, head_stride, token_stride, content_stride));
          },
          "group"_a, "heads"_a, "page_tokens"_a, "block_stride"_a, "head_stride"_a, "token_stride"_a, "content_stride"_a,
          "Any strides of a [blocks, heads, tokens, content] tensor whose content joins the planes (K then V). Strides in bytes: "
          "those of a "
          "torch tensor times its element_size().")
      .def_static(
          "planes",
          [](std::int64_t heads, std::int64_t page_tokens, std::int64_t page_stride, std::vector<PlaneLayout> planes) {
            return take(PageLayout::planes(heads, page_tokens, page_stride, std::move(planes)));
          },
          "heads"_a, "page_tokens"_a, "page_stride"_a, "planes"_a,
          "Any planes at all: a plane may begin past page_stride where it is a tensor of its own.\n\n"
          "Raises InvalidArgument: two bytes of one page that would be the same, or a plane that reaches past its page.")
      .def_prop_ro("heads", &PageLayout::heads, "Heads that one rank holds.")
      .def_prop_ro("page_tokens", &PageLayout::page_tokens, "Slots of a page.")
      .def_prop_ro("page_stride", &PageLayout::page_stride, "From page to page, bytes.")
      .def_prop_ro(
          "plane_layouts", [](const PageLayout& layout) { return layout.planes(); }, "Each plane's place.")
      .def_prop_ro("payload", &PageLayout::payload, "Bytes that one page holds of this rank's data, padding not counted.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object) -> bool"))
      .def("__hash__", [](const PageLayout& of) { return of.page_stride(); });
}

void bind_sets(nb::module_& m) {
  nb::class_<StridedSet>(m, "StridedSet",
                         "An index set as sharding rules make them: blocks of segments at constant strides (nested FALLS).")
      .def(nb::new_([](const std::string& text) { return take(StridedSet::parse(text)); }), "text"_a,
           "`none`, `start+length`, `start+length/stride*count` or `start+length/inner_stride*inner_count/stride*count`; `inf`: "
           "for ever.")
      .def_prop_ro("start", &StridedSet::start, "The first index.")
      .def_prop_ro(
          "end", [](const StridedSet& set) { return bounded(set.end()); }, "One past the last index; None if there is none.")
      .def("count_below", &StridedSet::count_below, "index"_a,
           "Members below `index`: also the position of a member within the set.")
      .def("__contains__", &StridedSet::contains, "index"_a)
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object) -> bool"))
      .def("__hash__", [](const StridedSet& of) { return std::hash<std::string>()(to_string(of)); })
      .def("__str__", [](const StridedSet& set) { return to_string(set); })
      .def("__repr__", [](const StridedSet& set) { return fmt::format("StridedSet('{}')", to_string(set)); });
  nb::class_<Sharding>(
      m, "Sharding", "How a side shards its cache, in the words of engines and of the command line: `tp=8,dcp=4`, `cp=8:layers`.")
      .def(nb::new_([](const std::string& words) { return take(Sharding::parse(words)); }), "words"_a,
           "Raises ParseError or InvalidArgument: two lines, the sentence and the words with the wrong one marked. The grammar: "
           "src/geometry/sharding.h.")
      .def_prop_ro("ranks", &Sharding::ranks, "tp * cp * pp. Linear ranks count tp fastest, then cp, then pp, as vLLM's do.")
      .def_prop_ro("tp", &Sharding::tp, "Tensor parallel ranks, those of dcp included.")
      .def_prop_ro("dcp", &Sharding::dcp, "Decode context parallel ranks, which are tp ranks: dcp rank = tp rank mod dcp.")
      .def_prop_ro("cp", &Sharding::cp, "Prefill context parallel ranks.")
      .def_prop_ro("pp", &Sharding::pp, "Pipeline stages.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object) -> bool"))
      .def("__hash__", [](const Sharding& of) { return std::hash<std::string>()(to_string(of)); })
      .def("__str__", [](const Sharding& sharding) { return to_string(sharding); })
      .def("__repr__", [](const Sharding& sharding) { return fmt::format("Sharding('{}')", to_string(sharding)); });
}

void bind_side(nb::module_& m) {
  nb::enum_<TokenRule>(m, "TokenRule", "How a side cuts the token axis of a group.")
      .value("all", TokenRule::all, "it does not")
      .value("cyclic", TokenRule::cyclic, "part d of N: tokens t with (t / stripe) mod N == d")
      .value("blocked", TokenRule::blocked, "part d of N: block d of the request's tokens")
      .value("zigzag", TokenRule::zigzag, "part d of N: chunks d and 2N-1-d of 2N")
      .value("value", TokenRule::value, "part d of N: the tokens of virtual pages v with v mod N == d");
  nb::class_<Place>(m, "Place", "Which part of each axis a rank has of a group; ranks with the same three parts are replicas.")
      .def_ro("layers", &Place::layers, "Index of its part of the layers.")
      .def_ro("heads", &Place::heads, "Index of its part of the heads.")
      .def_ro("tokens", &Place::tokens, "Index of its part of the tokens.")
      .def_ro("replica", &Place::replica, "The how-manieth rank it is with these parts.")
      .def_ro("holds", &Place::holds, "False: the rank has nothing of the group.");
  nb::class_<GroupSide>(m, "GroupSide", "One cache group on one side.")
      .def_ro("name", &GroupSide::name, "The group's.")
      .def_ro("kind", &GroupSide::kind, "A row a token, or a row a request.")
      .def_prop_ro(
          "layers", [](const GroupSide& side) { return numbers(side.layers); }, "Global layer ids; an ordinal is an index here.")
      .def_ro("heads", &GroupSide::heads, "Of the whole group.")
      .def_ro("planes", &GroupSide::planes, "What a row is made of.")
      .def_ro("window", &GroupSide::window, "What attention still reads; None: everything.")
      .def_ro("layout", &GroupSide::layout, "Of every rank's pages.")
      .def_ro("layer_parts", &GroupSide::layer_parts, "Ordinals of each part.")
      .def_ro("head_parts", &GroupSide::head_parts, "Global heads of each part.")
      .def_prop_ro(
          "token_rule", [](const GroupSide& side) { return side.tokens.rule; }, "How tokens are cut.")
      .def_prop_ro(
          "token_parts", [](const GroupSide& side) { return side.tokens.parts; }, "Into how many parts.")
      .def_prop_ro(
          "stripe", [](const GroupSide& side) { return side.tokens.stripe; }, "Cyclic: tokens in turn; else 0.")
      .def_ro("places", &GroupSide::places, "Of each rank.");
  nb::class_<Side>(m, "Side", "One side, prefill or decode: its sharding worked out for a model.")
      .def(nb::new_([](const CacheShape& shape, const std::variant<std::string, Sharding>& sharding, std::int64_t default_page) {
             const auto words = std::holds_alternative<Sharding>(sharding)
                                    ? std::get<Sharding>(sharding)
                                    : take(Sharding::parse(std::get<std::string>(sharding)));
             return std::make_shared<Side>(take(Side::make(shape, words, default_page)));
           }),
           "shape"_a, "sharding"_a, "default_page"_a = 64,
           "`default_page`: tokens of a page where the words say no page=P.\n\n"
           "Raises InvalidArgument or Unsupported: the word that does not fit the model, marked, and what is possible.")
      .def_static(
          "parse", [](const std::string& text) { return std::make_shared<Side>(take(parse_side(text))); }, "text"_a,
          "Reads what str(side) prints, and nothing else. Raises ParseError with the line.")
      .def_static(
          "decode",
          [](nb::bytes data) {
            const auto* begin = static_cast<const std::uint8_t*>(data.data());
            return std::make_shared<Side>(take(decode_side({begin, data.size()})));
          },
          "data"_a, "Reads what encode() gives; other bytes are refused (ParseError, Unsupported, Exhausted).")
      .def(
          "encode",
          [](const Side& side) {
            const auto bytes = encode_side(side);
            return nb::bytes(bytes.data(), bytes.size());
          },
          "The side as bytes (FlatBuffers): what a rank tells of itself.")
      .def(
          "with_layout",
          [](const Side& side, const std::string& group, PageLayout layout) {
            auto changed = std::make_shared<Side>(side);
            take(changed->set_layout(group, std::move(layout)));
            return changed;
          },
          "group"_a, "layout"_a,
          "The same side with another layout of one group's pages, for engines that know their strides.\n\n"
          "Raises InvalidArgument: no such group, or heads or planes that differ.")
      .def_prop_ro("shape", &Side::shape, "The model's caches.")
      .def_prop_ro("sharding", &Side::sharding, "Its words.")
      .def_prop_ro("default_page", &Side::default_page, "Tokens of a page where the words say none.")
      .def_prop_ro("ranks", &Side::ranks, "How many.")
      .def_prop_ro("groups", &Side::groups, "Its cache groups, without those that it has not (`draft:none`).")
      .def_prop_ro(
          "digest", [](const Side& side) { return digest(side); }, "128 bits of its text, 32 hex digits.")
      .def(
          "bytes_per_token", [](const Side& side, std::int32_t rank) { return side.bytes_per_token(checked(side, rank)); },
          "rank"_a,
          "Bytes that `rank` keeps per token, averaged over a long request; state groups not counted. Raises OutOfRange.")
      .def(
          "held",
          [](const Side& side, std::int32_t rank) {
            std::vector<std::pair<std::string, std::int32_t>> out;
            for (const auto& [group, layer] : held_tensors(side, checked(side, rank)))
              out.emplace_back(side.groups()[static_cast<std::size_t>(group)].name, layer.value);
            return out;
          },
          "rank"_a, "The (group, layer) of each tensor that `rank` holds. Raises OutOfRange.")
      .def(
          "columns",
          [](const Side& side, const std::string& group, std::int32_t rank, std::int64_t tokens,
             std::optional<std::int64_t> total) {
            check_tokens(tokens, "tokens");
            if (total && *total < tokens) refuse(Code::invalid_argument, "{} tokens of a request of {}", tokens, *total);
            if (total) check_tokens(*total, "total");
            const auto index = static_cast<std::size_t>(group_index(side, group));
            return columns_needed(side.groups()[index], checked(side, rank), tokens, total.value_or(tokens));
          },
          "group"_a, "rank"_a, "tokens"_a, "total"_a = nb::none(),
          "Columns of rank's page table for the first `tokens` tokens of a request of `total` (None: of `tokens`). A state takes "
          "one; 0: the "
          "rank has nothing of the group. Rule `value`: those of all ranks. Raises InvalidArgument, OutOfRange.")
      .def(
          "__eq__",
          [](const Side& side, const nb::object& other) {
            // By their text: notes on where a shape comes from are for people, and no part of it.
            return nb::isinstance<Side>(other) && to_string(side) == to_string(nb::cast<const Side&>(other));
          },
          "other"_a)
      .def("__hash__", [](const Side& side) { return std::hash<std::string>()(digest(side)); })
      .def("__str__", [](const Side& side) { return to_string(side); })
      .def("__repr__", [](const Side& side) {
        return fmt::format("<Side {} of {}: {} ranks>", to_string(side.sharding()), side.shape().model(), side.ranks());
      });
}

}  // namespace

Rank checked(const Side& side, std::int32_t rank) {
  if (rank < 0 || rank >= side.ranks())
    refuse(Code::out_of_range, "there is no rank {}: the side {} has 0 to {}", rank, to_string(side.sharding()),
           side.ranks() - 1);
  return Rank(rank);
}

std::int32_t group_index(const Side& side, const std::string& group) {
  std::string known;
  for (std::size_t i = 0; i < side.groups().size(); ++i) {
    if (side.groups()[i].name == group) return static_cast<std::int32_t>(i);
    known += (known.empty() ? "" : ", ") + side.groups()[i].name;
  }
  refuse(Code::invalid_argument, "no cache group {} on this side: it has {}", group, known);
}

void bind_geometry(nb::module_& m) {
  bind_shape(m);
  bind_layout(m);
  bind_sets(m);
  bind_side(m);
}

}  // namespace kvloom::python
