from mutation import broken

LOOPS_OF_USERS = "test_own_loops.py"

TESTING = (
    broken(
        "a loop of one's own is held to nothing",
        "return [found for found in differences if found.amount > allowed(found.quantity)]",
        "return []",
        f"{LOOPS_OF_USERS}::test_a_norm_that_is_not_synchronized_is_found_by_hand",
        f"{LOOPS_OF_USERS}::test_a_mean_of_means_is_found",
        f"{LOOPS_OF_USERS}::test_what_differs_is_named",
    ),
    broken(
        "of a variable that train returns only the copy of the first replica is compared",
        "else strategy.experimental_local_results(value)\n    return [tf.convert",
        "else strategy.experimental_local_results(value)[:1]\n    return [tf.convert",
        f"{LOOPS_OF_USERS}::test_what_differs_is_named",
    ),
    broken(
        "the seeds are not set before a function of one's own",
        "    keras.utils.set_random_seed(0)\n    values =",
        "    values =",
        f"{LOOPS_OF_USERS}::test_a_right_loop_passes",
    ),
    broken(
        "replicas are accused of what differs on one device too",
        "raise tell(_TWICE, again) if again else",
        "raise",
        f"{LOOPS_OF_USERS}::test_what_is_another_each_time_is_not_blamed_on_replicas",
    ),
    broken(
        "NaN on one device is compared with NaN",
        "    check_finite(expected)\n",
        "",
        f"{LOOPS_OF_USERS}::test_what_cannot_be_compared_is_refused",
    ),
)
