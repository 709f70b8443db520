from betoken.training.part_gradients import PART_SCORES, PART_TOKENS, part_tokens


def test_a_part_holds_fewer_tokens_where_the_vocabulary_is_large() -> None:
    assert part_tokens(4096) == PART_TOKENS
    assert 0 < part_tokens(49152) * 49152 <= PART_SCORES
    assert part_tokens(1 << 30) == 1
