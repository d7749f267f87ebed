"""A connector that does nothing: what vLLM itself does more once any connector is attached.  For bench_idle.py."""

from vllm.distributed.kv_transfer.kv_connector.v1 import base


class NullConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens): ...

    def build_connector_meta(self, scheduler_output):
        return base.KVConnectorMetadata()

    def request_finished_all_groups(self, request, block_ids):
        return False, None

    def start_load_kv(self, forward_context, **kwargs): ...

    def wait_for_layer_load(self, layer_name): ...

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...

    def wait_for_save(self): ...
