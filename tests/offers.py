"""What each wing offers to the others: `file.name`, one list for each wing. tests/test_house.py compares it with the source."""

OFFERS = {
    "_jax": """
        along_axes.CONCATENATIONS along_axes.NEUTRAL along_axes.SLICES callbacks.forget_failed compilations.heard
        complaints.NEEDS_A_VALUE complaints.complaint_of complaints.needed_arguments costs.Work costs.costs_of costs.work_in
        dead_code.all_of dead_code.computing dead_code.is_undivided dead_code.opened dead_code.pruned
        distributed.before_shutdown
        distributed.choose_cpu_collectives distributed.clear_backends distributed.client distributed.has_backend
        distributed.is_known_platform distributed.is_recoverable distributed.known_devices distributed.late_devices
        distributed.listen_at distributed.place distributed.swallows_sigterm distributed.without_warnings forks.leave_to_parent
        interpreter.Analysis interpreter.Evaluation interpreter.Flattening interpreter.Interpreter interpreter.evaluate
        interpreter.run_parts interrupts.send_ignored_again jaxprs.Atom jaxprs.ClosedJaxpr jaxprs.Equation jaxprs.Jaxpr
        jaxprs.Literal jaxprs.Loop jaxprs.Part jaxprs.Var jaxprs.all_equations jaxprs.callee jaxprs.donated_inputs
        jaxprs.has_collective jaxprs.has_replica_number
        jaxprs.held_operands jaxprs.inner_constants jaxprs.inner_jaxprs jaxprs.inside jaxprs.inside_of jaxprs.is_backward
        jaxprs.is_collective jaxprs.is_function_of_operands jaxprs.is_ordered_print jaxprs.is_over_groups jaxprs.is_plain
        jaxprs.is_replica_number jaxprs.is_scan jaxprs.is_sum jaxprs.levels_of jaxprs.linear_operands jaxprs.loop_of
        jaxprs.meshes_in jaxprs.names_around jaxprs.num_bytes jaxprs.placements_in jaxprs.transforms_of marks.Mark marks.Purpose
        marks.mark marks.mark_p primitives.ADDITIONS primitives.ADDITIVE primitives.ADD_TO_FIRST primitives.AGAIN
        primitives.AXIS_SUMS primitives.BILINEAR primitives.BROADCASTS primitives.COMMUTATIVE primitives.COMPARE
        primitives.CONVERSIONS primitives.CONVOLUTIONS primitives.CUSTOM_DERIVATIVE primitives.DERIVATIVE_SUMS
        primitives.DEVICE_MAPS primitives.DEVICE_RANDOM primitives.DIVISIONS primitives.DOT_PRODUCTS primitives.DRAWS
        primitives.ELEMENTWISE primitives.FILLS primitives.HOST_CALLBACKS primitives.HOST_EFFECTS primitives.INLINE_CALLS
        primitives.KEEP_AXES primitives.LOOPS primitives.MAKE_SAME primitives.MOVES primitives.ONE_TO_ONE primitives.PADS
        primitives.PRINTS primitives.PURE primitives.RANDOM primitives.RESHAPES primitives.SAID_TWICE primitives.SCATTER_SUMS
        primitives.SELECTS primitives.SIMPLE primitives.SPREADS primitives.SUMS primitives.TRANSPOSES random_keys.Count
        random_keys.THREEFRY random_keys.are_counted random_keys.by_rows random_keys.draws_by_rows random_keys.folded
        random_keys.of_rows random_keys.plain topologies.runs_nothing tracing.NO_TRACE tracing.barrier tracing.bind
        tracing.computes_constants tracing.context tracing.current_trace tracing.have_explicit_axes tracing.have_mesh
        tracing.is_for_this_call tracing.is_mapped_over tracing.is_staging tracing.is_wide tracing.key_kind tracing.lowered
        tracing.new_operand tracing.operand_p tracing.room_for tracing.separate_caches tracing.settings tracing.trace
        tracing.trace_state tracing.untraced
        user_code.OURS user_code.equation_line user_code.hide_lines user_code.leave_out user_code.line_of user_code.raising_line
        user_code.shorten_errors user_code.show_users_lines user_code.user_line user_code.user_stacklevel user_code.warn
        versions.warn_if_untried
    """,
    "_cluster": """
        environments.is_left_alone meeting.Meeting meeting.meet resolvers.ClusterResolver resolvers.KubernetesClusterResolver
        resolvers.SimpleClusterResolver resolvers.SlurmClusterResolver resolvers.TFConfigClusterResolver
        resolvers.discover spec.Cluster spec.ClusterSpec spec.LOOPBACK spec.MAX_WORKERS spec.check_address
        spec.join_address spec.split_address
    """,
    "_workers": """
        coordination.Channel coordination.Coordination coordination.SLICE_SECONDS coordination.decoded
        coordination.digest joint_programs.Announced joint_programs.agree joint_programs.agreed joint_programs.exchange
        joint_programs.note joint_programs.of_chief joint_programs.prepared joint_programs.started machine.REMEDY
        machine.difference machine.warn_once machine.words progress.BatchPlace progress.NEXT_BATCH
        progress.in_main_thread progress.progress runtime.Runtime runtime.attach runtime.current runtime.exit_codes
        runtime.start runtime.starting_devices same_program.ONE_DATASET same_program.data_ended
        same_program.require_same_history verdict.tells_of_loss
    """,
    "_replicas": """
        arrays.as_array arrays.cast arrays.check_leaf arrays.check_losses arrays.check_range arrays.converted_number
        arrays.host_array arrays.is_numeric arrays.is_sparse arrays.is_wrapped arrays.refuse_mask arrays.strong
        collectives.AxesLike collectives.MAX_ARRAYS_PER_PACK collectives.PACK_BELOW_BYTES collectives.ReplicaAxis
        collectives.aggregate collectives.all_reduce collectives.check_axis collectives.normalize_axes collectives.pad_to
        collectives.sum_in_one_buffer context.ReplicaContext context.axis_of context.check_call context.current_replica
        context.knows_id context.own_parts cross_replica.Task cross_replica.aggregate_stack cross_replica.aggregated
        cross_replica.broadcast_stack cross_replica.compiled cross_replica.gather_mirrored cross_replica.gather_stack
        cross_replica.reduce_mirrored cross_replica.reduce_stack cross_replica.require_equal_except cross_replica.run_tasks
        cross_replica.split_stack division.Division division.Shaped division.division_in division.division_of
        division.division_of_array division.is_divisible division.placement_of division.placement_of_array frames.Frame
        frames.check_enterable frames.current frames.entered frames.foreign_trace_message frames.in_cross_replica_context
        frames.is_traced frames.require_cross_replica frames.require_no_mesh_around host_memory.empty_rows host_memory.gather
        host_memory.gathers in_flight.dispatch in_flight.finish in_flight.is_joint in_flight.is_paced in_flight.joined
        in_flight.new_witness in_flight.require_threads in_flight.started mesh.PlannedMesh mesh.ReplicaMesh mesh.cluster_mesh
        mesh.default_mesh mesh.make_mesh mesh.raising_cpu_threads mesh.replicas_of mesh.resolve_devices mesh.with_replicas
        named.seen per_replica.Origin per_replica.PerReplica per_replica.carried_sums per_replica.facts_of
        per_replica.is_per_replica per_replica.lost_rank per_replica.origin_of per_replica.proven_of per_replica.require_whole
        per_replica.stack_of per_replica.stack_shapes per_replica.uneven_shapes placement.Sliced placement.check_later
        placement.checksum placement.divide placement.divide_slices placement.join placement.mirror placement.mirror_constants
        placement.own_copy placement.refuse_argument placement.shared_with_user placement.stack placement.unshared
        planned.CompiledOnly planned.Planned planned.stand_in platforms.platform_of reductions.REDUCTIONS reductions.divide
        reductions.reduction_of rows_drawn.key_of spent.COMPUTATION spent.DeviceTime spent.Spent spent.forget_pause
        spent.last_profile spent.waited
    """,
    "_variables": """
        access.all_copies access.claimed access.copied access.lent access.load access.lose access.store access.store_in_parts
        assignment.check_per_replica bindings.Bindings bindings.bound bindings.outer_reader bindings.with_few_compilations
        equal_copies.CopiesCompared equal_copies.Watch equal_copies.check equal_copies.last_comparisons equal_copies.watch
        in_parts.describe making.make spec.VariableSpec spec.without_counters storage.Home storage.WeakVariables
        storage.held_arrays storage.home_of storage.lent storage.overwrite storage.overwrite_when_done
        tree.VariableTree tree.trainable variable.Variable
        variable.is_variable variable.listeners variable.live_variables variable.local_arrays variable.local_copies
        variable.note_use variable.spec_of variable.use_value
    """,
    "data": """
        _dataset.DistributedDataset _dataset.batch_rows _dataset.check_dataset _dataset.mesh_of
        _input_context.InputContext _iterator.DistributedIterator _iterator.expect_saves _iterator.joined _iterator.num_workers_of
        _sharing.agree.InputWorker _sharing.plan.SharingPlan _sharing.plan.make_plan _sharing.plan.plan_of_function
        _sharing.rows.count_rows _sharing.rows.split_sizes _sharing.rows.to_numpy _sharing.steps.LocalReplicas
        _sources.numpy_dataset.NumpyDataset _sources.numpy_dataset.stacked_lists _sources.open.adapted
        _sources.open.open_source
    """,
    "_models": """
        libraries.LIBRARIES libraries.has_strangers libraries.imported libraries.in_scope
        libraries.own_variable libraries.static_leaves libraries.traced libraries.tree_of objects.arrays_by_name
        objects.arrays_in objects.held_in objects.is_object objects.run_with objects.set_arrays
    """,
    "_program": """
        advice.Said call.Call call.argument_names call.check_replicas dispatch.Dispatcher eager.eager lift.Lifted
        lift.plan_result lift.trace memory.Memory program.Program program.annotate program.collectives_of
        program.describe_program program.name_of_collective program.program_compiled recompilations.listeners
        refusals.check_outside steps.Steps
    """,
    "_transforms": """
        function.function function.function_programs gradients.check_variables gradients.grad gradients.value_and_grad
        loops.cond loops.fori_loop loops.scan
    """,
    "_strategy": """
        current.DefaultStrategy current.get_replica_context current.get_strategy current.has_strategy
        strategies.MirroredStrategy strategies.MultiWorkerMirroredStrategy strategies.OneDeviceStrategy
        strategy.Strategy strategy.coordination_of strategy.joint_strategy strategy.parts_of values.ValueContext
    """,
    "_checkpoint": """
        checkpoint.Checkpoint export.export preemption.PreemptionHandler
    """,
    "_testing": """
        copies.assert_equal_copies copies.copies inputs.InputOfWorkers inputs.input_of_workers programs.ProgramCount
        programs.assert_compiles programs.count_programs replicas.assert_same_on_any_replicas
    """,
    "_command": """
        ending.Budget ending.describe_failure ending.summarize group.Group output.Outlet output.make_log_folder
        signals.Signals
    """,
    "_report": """
        bar.progress profile.profile report.report
    """,
}
