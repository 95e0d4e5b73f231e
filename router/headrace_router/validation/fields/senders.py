"""The clients, gateways and servers that define or send each field. Data only, from their sources in 2026.

OpenAI: the Python client's types. vLLM, SGLang, TGI, llama.cpp: the fields of their own servers, which their clients
send. sglang-router: the fields that it adds to every body. LiteLLM, LangChain, Open WebUI, Ollama: what they send.
"""

from headrace_router.validation.fields.scope import Scope

_OPENAI_SAMPLING = "frequency_penalty logit_bias max_tokens n presence_penalty seed stop temperature top_p"
_ENGINE_SAMPLING = "top_k min_p min_tokens repetition_penalty stop_token_ids ignore_eos"

_VLLM = f"""
    model stream stream_options user logprobs echo response_format {_OPENAI_SAMPLING} {_ENGINE_SAMPLING}
    use_beam_search watermarking length_penalty early_stopping include_stop_str_in_output skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids
    allowed_token_ids bad_words logits_processors add_special_tokens structured_outputs guided_json guided_regex
    guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern priority request_id session_id
    return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets return_mm_kwargs
    cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget
    stream_interval best_of
"""
_SGLANG = f"""
    model stream stream_options user logprobs response_format {_OPENAI_SAMPLING} {_ENGINE_SAMPLING}
    regex ebnf stop_regex no_stop_trim skip_special_tokens lora_path session_id session_params custom_params
    custom_logit_processor images_config return_hidden_states return_routed_experts routed_experts_start_len
    return_cached_tokens_details return_token_ids rid extra_key cache_salt ngram_corpus_id priority bootstrap_host
    bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank sampling_seed
"""
_LLAMA_CPP = f"""
    model stream logprobs response_format json_schema grammar {_OPENAI_SAMPLING} top_k min_p ignore_eos
    dynatemp_range dynatemp_exponent typical_p tfs_z repeat_penalty repeat_last_n dry_multiplier dry_base
    dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold mirostat mirostat_tau
    mirostat_eta min_keep samplers n_predict n_cmpl n_indent n_keep n_discard n_cache_reuse t_max_predict_ms id_slot
    cache_prompt n_probs post_sampling_probs return_tokens timings_per_token return_progress response_fields lora
    sse_ping_interval
"""
_TGI = f"""
    model stream stream_options logprobs {_OPENAI_SAMPLING} adapter_id max_new_tokens do_sample typical_p watermark
    return_full_text details
"""
_OLLAMA = f"model stream stream_options {_OPENAI_SAMPLING} keep_alive options num_ctx num_predict repeat_penalty"

_SENDERS: dict[str, dict[Scope, str]] = {
    "OpenAI": {
        Scope.CHAT: f"""
            messages model stream stream_options {_OPENAI_SAMPLING} audio function_call functions logprobs
            max_completion_tokens metadata modalities moderation parallel_tool_calls prediction prompt_cache_key
            prompt_cache_options prompt_cache_retention reasoning_effort response_format safety_identifier
            service_tier store tool_choice tools top_logprobs user verbosity web_search_options
        """,
        Scope.COMPLETIONS: f"model prompt stream stream_options {_OPENAI_SAMPLING} best_of echo logprobs suffix user",
        Scope.STREAM_OPTIONS: "include_usage include_obfuscation",
        Scope.MESSAGE: "role content name audio function_call refusal tool_calls tool_call_id annotations",
        Scope.PART: "type text prompt_cache_breakpoint annotations",
    },
    "vLLM": {
        Scope.CHAT: f"""
            {_VLLM} messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls reasoning_effort
            include_reasoning chat_template chat_template_kwargs documents add_generation_prompt
            continue_final_message mm_processor_kwargs media_io_kwargs return_prompt_text
        """,
        Scope.COMPLETIONS: f"{_VLLM} prompt suffix prompt_embeds",
        Scope.STREAM_OPTIONS: "include_usage continuous_usage_stats",
        Scope.MESSAGE: "role content name tool_calls tool_call_id reasoning reasoning_content",
        Scope.PART: "type text",
    },
    "SGLang": {
        Scope.CHAT: f"""
            {_SGLANG} messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls
            reasoning_effort reasoning return_prompt_token_ids return_meta_info task continue_final_message
            separate_reasoning stream_reasoning chat_template_kwargs max_dynamic_patch min_dynamic_patch
            use_audio_in_video input_ids
        """,
        Scope.COMPLETIONS: f"{_SGLANG} prompt suffix echo best_of json_schema custom_labels",
        Scope.STREAM_OPTIONS: "include_usage continuous_usage_stats",
        Scope.MESSAGE: "role content name tool_calls tool_call_id tools reasoning_content",
        Scope.PART: "type text",
    },
    "sglang-router": {
        Scope.CHAT: """
            logprobs stream no_stop_trim ignore_eos continue_final_message skip_special_tokens separate_reasoning
            stream_reasoning return_hidden_states routing_id
        """,
        Scope.COMPLETIONS: "stream echo no_stop_trim ignore_eos skip_special_tokens return_hidden_states routing_id",
    },
    "llama.cpp": {
        Scope.CHAT: f"{_LLAMA_CPP} messages top_logprobs tools tool_choice chat_template_kwargs reasoning_format",
        Scope.COMPLETIONS: f"{_LLAMA_CPP} prompt",
        Scope.MESSAGE: "role content tool_calls tool_call_id reasoning_content",
        Scope.PART: "type text",
    },
    "TGI": {
        Scope.CHAT: f"{_TGI} messages top_logprobs tools tool_choice tool_prompt response_format guideline",
        Scope.COMPLETIONS: f"{_TGI} prompt suffix",
    },
    "LiteLLM": {
        Scope.CHAT: "thinking reasoning_effort enable_thinking safe_prompt extra_body stop_sequences",
        Scope.COMPLETIONS: "extra_body max_completion_tokens stop_sequences",
        Scope.MESSAGE: """
            provider_specific_fields thinking_blocks reasoning_content reasoning_details cache_control prefix
            annotations
        """,
        Scope.PART: "cache_control",
    },
    "LangChain": {
        Scope.CHAT: f"""
            messages model stream stream_options {_OPENAI_SAMPLING} max_completion_tokens logprobs top_logprobs
            reasoning_effort reasoning verbosity service_tier store tools tool_choice parallel_tool_calls
            response_format user metadata stop_sequences
        """,
        Scope.COMPLETIONS: f"model prompt stream {_OPENAI_SAMPLING} best_of logprobs",
        Scope.STREAM_OPTIONS: "include_usage",
        Scope.MESSAGE: "role content name tool_calls tool_call_id function_call audio",
        Scope.PART: "type text cache_control annotations",
    },
    "Open WebUI": {
        Scope.CHAT: """
            messages model stream stream_options temperature top_p top_k min_p max_tokens frequency_penalty
            presence_penalty repeat_penalty reasoning_effort seed stop logit_bias response_format tools user keep_alive
            num_ctx num_predict think
        """,
        Scope.STREAM_OPTIONS: "include_usage",
        Scope.MESSAGE: "role content tool_calls tool_call_id",
        Scope.PART: "type text",
    },
    "Ollama": {
        Scope.CHAT: f"{_OLLAMA} messages tools response_format reasoning_effort think",
        Scope.COMPLETIONS: f"{_OLLAMA} prompt suffix",
    },
}

SENDERS: dict[Scope, dict[str, tuple[str, ...]]] = {
    scope: {
        name: tuple(sender for sender, lists in _SENDERS.items() if name in lists.get(scope, "").split())
        for name in sorted({name for lists in _SENDERS.values() for name in lists.get(scope, "").split()})
    }
    for scope in Scope
}
