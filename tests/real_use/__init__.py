"""
What people met in real use, and the test that holds it: in this folder, or in the folder of tests that is named.

Weights
    a change of the draft's weights is undone           test_weights.py::test_weights_that_change_after_the_worker_copied_them_stay_changed
    the target's weights are undone, shared modules     test_weights.py::test_modules_that_draft_and_target_share_stay_the_target_s
    a worker drafts with old weights                    test_weights.py::test_a_running_worker_drafts_with_new_weights
    a worker drafts from keys of old weights            test_weights.py::test_keys_and_values_of_old_weights_are_dropped
    layers cut, replaced, hooked, quantized, on disk    test_weights.py::test_a_draft_that_a_worker_cannot_rebuild
    a model on meta                                     test_weights.py::test_a_model_without_weights_is_refused_before_work

Models
    fewer positions than the target                     test_models.py::test_a_draft_with_fewer_positions_drafts_up_to_its_limit
    the same on the command line                        test_models.py::test_the_command_line_measures_a_draft_with_fewer_positions
    windows counted from the cache's end (GPT-Neo)      test_models.py::test_a_model_that_counts_its_window_from_the_end_of_the_cache_is_refused
    gradient checkpointing in training mode             test_models.py::test_gradient_checkpointing_left_on_in_training_mode_is_refused
    int8 activations, one scale for a whole pass        test_models.py::test_a_target_whose_logits_depend_on_the_rest_of_the_pass_is_refused
    a config with use_cache=False                       test_models.py::test_a_config_without_a_cache_is_named
    hybrid models refused                               test_hybrids.py::test_greedy_tokens_are_those_of_plain_generate
    any other family                                    conformance/test_families.py::test_a_family_gives_the_tokens_of_plain_generate_or_is_refused
    compiled with a backend of the user's               test_compiled.py::test_a_target_is_compiled_by_the_users_backend
    no C++ compiler                                     test_compiled.py::test_what_cannot_be_compiled_runs_uncompiled_and_says_so_once
    a hook or forward attached after the first call     test_hooks_and_adapters.py::test_a_hook_that_acts_on_some_tokens_of_a_pass_is_refused_by_its_name
    a layer whose forward is replaced                   test_hooks_and_adapters.py::test_a_replaced_forward_is_refused_by_its_name
    activated LoRA                                      test_hooks_and_adapters.py::test_an_activated_lora_is_refused_by_its_name
    rows with adapters of their own                     test_hooks_and_adapters.py::test_rows_with_adapters_of_their_own_speculate
    a generate() of the class's own is left out         test_models.py::test_a_class_with_a_generate_of_its_own_is_called_by_it
    Granite Speech's adapter                            test_models.py::test_granite_speech_switches_its_adapter
    a class with its own _sample                        test_models.py::test_a_class_that_decodes_by_itself_is_refused
    accelerate's mixed precision refused                test_models.py::test_a_model_prepared_for_mixed_precision_speculates
    a repeated layer's cache is returned                conformance/test_families.py::test_the_returned_cache_of_a_model_that_repeats_its_layers_has_those_of_each_repetition
    a target in 4 bits                                  test_quantized.py::test_a_target_in_4_bits_has_its_own_tokens_and_a_draft_in_32
    a second thread is refused at random                test_one_model_for_all.py::test_threads_that_share_a_target_get_the_tokens_of_plain_decoding
    two targets with one draft refuse at random         test_one_model_for_all.py::test_two_targets_share_a_draft_in_this_process
    calls through asyncio are refused at random         test_one_model_for_all.py::test_tasks_in_threads_of_asyncio
    an interrupt leaves a name in the config            test_one_model_for_all.py::test_no_config_of_target_or_draft_is_written
    a processor's passes are taken for the call's       test_one_model_for_all.py::test_passes_of_a_processor_are_not_taken_for_those_of_the_call

Tokenizers
    a question on the terminal about custom code        test_custom_code.py::test_a_call_with_models_of_custom_code_does_not_ask
    names with the letter of byte-level tokens          test_tokenizers.py::test_a_vocabulary_with_names_of_the_letter_that_byte_level_tokens_begin_with_drafts
    tokenizers kept for ever                            test_tokenizers.py::test_tokenizers_are_not_kept_longer_than_their_user_keeps_them
    SmolLM2 as the draft of Gemma 3                     test_public_weights.py::test_smollm_drafts_for_gemma_with_its_own_tokenizer
    a draft of another tokenizer in a pipeline          test_bound_tokenizers.py::test_a_pipeline_speculates_with_a_draft_of_another_tokenizer
    the same on the server                              test_bound_tokenizers.py::test_a_server_speculates_with_a_draft_of_another_tokenizer
    token_healing                                       test_token_healing.py::test_token_healing_gives_plain_generations_tokens
    tokenizers of mistral-common                        test_tokenizers.py::test_a_tokenizer_of_another_library_is_read_through_decode

Tokens
    a processor that returns another dtype              test_right_tokens.py::test_callbacks_may_return_what_plain_generation_takes
    n-grams verified before the draft is asked          test_right_tokens.py::test_the_draft_reads_the_targets_text_where_ngrams_were_verified_without_it
    a sound row beside one that is not finite           test_right_tokens.py::test_a_sound_row_beside_one_that_is_verified_again_keeps_its_accepted_tokens
    ranks out of step after a worker's death            test_right_tokens.py::test_ranks_stay_in_step_where_the_worker_dies_between_its_tokens_and_what_they_were_drawn_from
    no rows                                             test_right_tokens.py::test_a_batch_without_rows_is_refused_in_one_sentence
    a seed that does not repeat                         test_right_tokens.py::test_a_seed_repeats_a_call_with_fixed_settings_whatever_the_fallback
    sampling biased where drafted keys are not finite   conformance/test_unsound_sampled.py::test_strings_have_the_targets_distribution
    the same with a worker                              conformance/test_unsound_sampled.py::test_strings_have_the_targets_distribution_with_a_worker
    labels in a batch, Seq2SeqTrainer                   test_calls_of_an_enabled_model.py::test_a_trainer_that_predicts_with_generate_speculates
    a message names what the user never wrote           test_calls_of_an_enabled_model.py::test_a_message_of_a_bound_call_names_what_its_user_can_do
    a call within a call of a bound target              test_calls_of_an_enabled_model.py::test_a_call_within_a_call_of_a_bound_target

Whether it speculates
    a first call of one token switches it off           test_speculates.py::test_a_short_first_call_does_not_switch_it_off
    several drafts                                      test_speculates.py::test_several_drafts_draft_ahead
    a fallback object                                   test_speculates.py::test_a_fallback_object_is_asked_and_drafts_ahead
    the recipe for a fallback                           test_speculates.py::test_the_fallback_of_the_recipe_is_used
    costs measured again for each temperature           test_speculates.py::test_a_new_temperature_measures_no_costs_again
    a busy moment keeps a call plain                    planning/test_what_pays.py::test_rounds_that_were_disturbed_do_not_keep_a_call_plain
    a slow draft's first calls                          planning/test_what_pays.py::test_the_first_short_calls_cost_next_to_nothing
    in turn with half of the cores idle                 distributed/test_cores.py::test_a_draft_has_all_cores_while_the_target_waits_for_it
    probes that read the whole text again               planning/test_what_pays.py::test_probes_of_a_draft_that_has_much_to_read_are_rarer
    a draft measured once, on a busy machine            planning/test_what_pays.py::test_the_plan_in_the_end_is_the_one_that_pays
    plain rounds replayed one by one                    planning/test_plain_mode.py::test_nothing_is_sent_in_plain_mode_and_one_message_carries_what_went_by

Memory and processes
    each call's cache waits for the collector           test_memory_and_processes.py::test_the_memory_of_a_call_is_free_when_it_returns
    standard input closed                               test_memory_and_processes.py::test_a_program_without_standard_input_has_a_worker
    a descriptor left by each start that fails          test_memory_and_processes.py::test_starts_that_fail_leave_no_descriptor
    a worker's standard error grows                     test_memory_and_processes.py::test_what_a_worker_writes_to_its_standard_error_is_bounded
    an error of the protocol that hangs                 test_memory_and_processes.py::test_a_worker_that_meets_an_error_of_the_protocol_ends_at_once

Server
    temperature=1.5 is greedy                           test_server.py::test_a_positive_temperature_samples
    seeds do not repeat                                 test_server.py::test_requests_with_one_seed_give_one_text_although_others_are_between
    a seed reaches others' answers                      test_server.py::test_a_seed_of_one_client_does_not_reach_the_answers_of_others
    max_tokens=0                                        test_server.py::test_no_tokens_are_refused
    parameters accepted and ignored                     test_server.py::test_what_is_not_done_is_refused_by_its_name
    stop=[] and a whole logit_bias                      test_server.py::test_what_asks_for_nothing_is_taken
    an error inside a stream                            test_server.py::test_an_error_inside_a_stream_reaches_openais_client_with_its_message
    values of another kind                              test_server.py::test_values_of_another_kind_are_refused_in_openais_form
    a client that leaves                                test_server.py::test_a_client_that_leaves_ends_its_call_and_what_waits_is_dropped
    clients that try again                              test_server.py::test_clients_that_try_again_leave_nothing_to_do
    a long prompt stops the server                      test_server.py::test_health_answers_while_a_prompt_is_tokenized
    bad bodies                                          test_server.py::test_a_bad_body_is_refused_in_openais_form
    any name of a host                                  test_server.py::test_a_page_of_another_name_or_site_cannot_use_the_server
    Ctrl-C amid an answer                               test_serving_life.py::test_ctrl_c_amid_an_answer_ends_in_one_line_and_all_clients_get_an_error
    stop strings stand in the answer                    test_stop_strings.py::test_a_text_ends_before_its_stop_string
    the page says it waits while it reads the prompt    serving/test_page_states.py::test_the_status_says_what_happens_in_words_and_seconds
    a continued text loses the space between answers    serving/test_page.py::test_the_page_asks_for_a_key_and_continues_the_texts_of_a_model_without_a_chat_template
    a temperature of 1e-300                             serving/test_requests.py::test_a_temperature_that_float32_does_not_hold_is_refused
    a forced token outside of the vocabulary            serving/test_requests.py::test_a_token_outside_of_the_vocabulary_is_refused_in_any_field
    a traceback for a client that leaves in its body    serving/test_requests.py::test_a_client_whose_body_does_not_end_leaves_nothing_in_the_log
    an answer cut within a tool call                    serving/test_answers.py::test_an_answer_that_ends_within_a_tool_call_is_its_text
    a tool call that is no JSON                         serving/test_answers.py::test_a_tool_call_that_cannot_be_read_is_its_text
    a list of prompts, or of ids                        serving/test_requests.py::test_a_prompt_is_a_text_or_tokens_or_a_list_of_either
    responses that stream by default                    serving/test_requests.py::test_responses_stream_only_if_asked
    an empty list of tool calls loses the text          serving/test_requests.py::test_an_empty_list_in_a_message_does_not_lose_its_text
    tools that the template ignores                     serving/test_requests.py::test_tools_that_the_template_does_not_use_are_refused
    a folder as the model's name                        serving/test_requests.py::test_clients_are_told_a_name_and_not_a_folder
    a slow first request                                test_serving_life.py::test_a_first_answer_is_generated_with_the_draft_before_the_server_listens

Command line
    a full window in a chat                             test_command_line.py::test_a_chat_with_full_windows_goes_on_when_its_template_changes_an_old_answer
    Ctrl-C in an answer                                 test_command_line.py::test_ctrl_c_in_an_answer_keeps_the_answer_so_far_and_the_conversation
    a check that does not end                           test_command_line.py::test_a_check_measures_within_its_seconds_what_fits
    a draft with another tokenizer                      test_command_line.py::test_check_measures_a_pair_with_different_tokenizers
    a folder that is missing                            test_what_is_missing.py::test_a_folder_that_is_missing_is_named
    exit code 2 for a pair that was only slow           test_command_line.py::test_a_pair_too_slow_for_the_seconds_is_not_measured_and_the_seconds_that_it_needs_suffice
    a GGUF file named by its path                       cli/test_gguf.py::test_a_chat_with_files_on_both_sides
    a folder with one GGUF file as the draft            cli/test_gguf.py::test_a_draft_in_a_file_drafts_for_calls
    a paste of three lines is three messages            test_command_line.py::test_on_a_terminal_a_paste_is_one_message_and_ctrl_c_says_how_to_leave

Platforms
    importing on Windows raises                         test_platforms.py::test_every_module_can_be_imported_without_what_windows_lacks
    a draft on Windows                                  test_platforms.py::test_on_windows_a_loaded_draft_drafts_in_turn_and_others_are_refused
    a worker on macOS                                   test_platforms.py::test_a_worker_without_the_functions_of_linux
"""  # noqa: E501
