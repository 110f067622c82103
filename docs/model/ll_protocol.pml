/* Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
 *
 * The words of one slot, as docs/protocol.md lists them, between two ranks of two blocks each (EXPERT_MAJOR, one
 * expert per rank, one route per token). A rank is a Stream, which launches kernels one after the other, and two
 * Blocks, which run them. In every round each rank chooses anew: how many tokens (0, 1, 2) and for which experts;
 * eager call or replay; dispatch and combine in one launch each or in two; experts that write in place or a combine
 * that copies. Delays are all interleavings of the steps below. A step writes one word that others read meanwhile, or
 * waits and then takes one row: flags only grow, so a late wait stands for an early one and a delay.
 *
 * Asserted: whoever reads a row finds the right round, source and token; no row is written over before its last read;
 * no wait meets a word of a later round (nobody is more than a phase ahead); the epoch base counts the rounds. Spin
 * adds: no deadlock.
 *
 * Memory is sequentially consistent here: that a flag follows its rows is the order of the steps, which release and
 * acquire must provide in the code (FAULT 5 is their absence). Time-outs, abort and reset are not modelled. Slots share
 * no word but abort, so one stands for all.
 *
 *   spin -a ll_protocol.pml && cc -O2 -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m10000 -w25
 *
 * "spin -a -DFAULT=n" seeds an error, which pan must find:
 *   1  the epoch is passed by value, so that each replay repeats the captured one
 *   2  a block writes its dispatch flags only if it sent a token
 *   3  combine waits only for the ranks that it pulls from
 *   4  block 0 moves the epoch base without the ticket
 *   5  a block writes its dispatch flags before its rows
 *   6  expert_output is written between dispatch_send and dispatch_recv
 *   7  fresh flag words are 0 instead of first_epoch
 *   8  a block draws its ticket before all its threads have read the base
 */
#ifndef FAULT
#define FAULT 0
#endif
#ifndef ROUNDS
#define ROUNDS 3
#endif

/* Epochs wrap at 8, and the rounds cross the wrap: 7, 0, 1, ... */
#define WRAP 8
#define FIRST_EPOCH 6
#define IS_NOT_OLDER(seen, wanted) (((seen) + WRAP - (wanted)) % WRAP < WRAP / 2)

/* Arrays of two dimensions: [rank, block], [rank, token], [rank, row]. */
#define AT(i, j) ((i) * 2 + (j))

/* ---- words that peers write */
#define FLAG(dst, src, block) ((dst) * 4 + (src) * 2 + (block))
byte dispatch_flags[8];
byte combine_flags[8];
#define COUNT(dst, src, expert) ((dst) * 4 + (src) * 2 + (expert))
#define PACKET(epoch, value) ((epoch) * 2 + (value))
#define EPOCH_OF(packet) ((packet) / 2)
#define VALUE_OF(packet) ((packet) % 2)
byte expert_counts[8];

/* ---- rows, two of each expert (a rank sends it one at most): 0 when nobody has still to read it */
#define TAG(round, src, token) ((round) * 4 + (src) * 2 + (token))
byte recv_x[4];        /* written by peers */
byte expert_output[4]; /* read by peers */

/* ---- a rank's own words */
byte epoch_base[2];
byte ticket[2];
byte num_tokens[2];
bool expert_of[4]; /* [rank, token]: topk_ids; expert i is on rank i */
bool route_row[4]; /* [rank, token] */

/* ---- the launch under way on a rank */
#define DISPATCH_SEND 1
#define DISPATCH_RECV 2
#define COMBINE_SEND 4
#define COMBINE_RECV 8
byte halves[2];
bool is_in_place[2];
byte delta[2];      /* Workload.epoch_delta */
byte value[2];      /* FAULT 1: the Workload's epoch */
bool is_running[4]; /* [rank, block] */
byte round[2];      /* for the assertions */

#define NUM_TO(rank, expert) \
  ((num_tokens[rank] > 0 && expert_of[AT(rank, 0)] == (expert)) + \
   (num_tokens[rank] > 1 && expert_of[AT(rank, 1)] == (expert)))
#define NUM_FROM(rank, src) VALUE_OF(expert_counts[COUNT(rank, src, rank)])
#define NUM_ROWS(rank) (NUM_FROM(rank, 0) + NUM_FROM(rank, 1))

#define HAS_FLAGS(flags, me, src, epoch) \
  (IS_NOT_OLDER(flags[FLAG(me, src, 0)], epoch) && IS_NOT_OLDER(flags[FLAG(me, src, 1)], epoch))
#define HAS_COUNT(dst, src, expert, epoch) IS_NOT_OLDER(EPOCH_OF(expert_counts[COUNT(dst, src, expert)]), epoch)

/* The last reader of a received row (the experts in place, or the send half of combine) passes it on. */
inline pass_row(rank, i) {
  assert(recv_x[AT(rank, i)] / 4 == round[rank]);
  assert((recv_x[AT(rank, i)] / 2) % 2 == (i >= NUM_FROM(rank, 0))); /* rows lie by source rank */
  assert(expert_output[AT(rank, i)] == 0);
  expert_output[AT(rank, i)] = recv_x[AT(rank, i)];
  recv_x[AT(rank, i)] = 0
}

/* Only words that somebody reads: the counts of a rank's own expert, and rank 0's for rank 1. */
inline publish_counts(dst) {
  expert_counts[COUNT(dst, me, dst)] = PACKET(epoch, NUM_TO(me, dst));
  if
  :: dst == 1 && me == 0 -> expert_counts[COUNT(1, 0, 0)] = PACKET(epoch, NUM_TO(0, 0))
  :: else
  fi
}

/* This block's share of the tokens: none or one. */
#define TOKEN (num_tokens[me] * block / 2)
#define HAS_TOKEN (num_tokens[me] * block / 2 < num_tokens[me] * (block + 1) / 2)
#define DST expert_of[AT(me, TOKEN)]

inline publish_flag(word) {
  if
  :: FAULT == 2 && !HAS_TOKEN
  :: else -> word = epoch
  fi
}

/* Steps of a block. */
#define IDLE 0
#define JOIN 1
#define COUNTS 2
#define ROW 3
#define DISPATCH_FLAGS 4
#define LATE_ROW 5 /* FAULT 5 */
#define DISPATCH_WAIT 6
#define COPY 7
#define COMBINE_FLAGS 8
#define DRAW_TICKET 9
#define LATE_JOIN 10 /* FAULT 8 */
#define COMBINE_WAIT_AND_PULL 11

/* After a wait: the word is of this round and of no later one. Off for faults that the rows themselves must show. */
#define ASSERT_NOT_LATER(seen) assert(FAULT == 3 || FAULT == 7 || (seen) == epoch)

inline end_block() {
  step = IDLE;
  epoch = 0;
  is_running[AT(me, block)] = 0
}

inline end_dispatch_send() {
  if
  :: halves[me] & DISPATCH_RECV -> step = DISPATCH_WAIT
  :: else -> end_block()
  fi
}

inline end_counts(dst_bit) {
  sent = sent | dst_bit;
  if
  :: sent == 3 -> sent = 0; step = (HAS_TOKEN -> ROW : DISPATCH_FLAGS)
  :: else
  fi
}

#define IS_AT_DISPATCH_FLAGS (step == DISPATCH_FLAGS || FAULT == 5 && step == ROW)
inline end_dispatch_flags(dst_bit) {
  sent = sent | dst_bit;
  if
  :: sent == 3 ->
    sent = 0;
    if
    :: FAULT == 5 && HAS_TOKEN -> step = LATE_ROW
    :: else -> end_dispatch_send()
    fi
  :: else
  fi
}

inline end_combine_flags(dst_bit) {
  sent = sent | dst_bit;
  if
  :: sent == 3 ->
    sent = 0;
    if
    :: halves[me] & COMBINE_RECV -> step = DRAW_TICKET
    :: else -> end_block()
    fi
  :: else
  fi
}

proctype Block(byte me; byte block) {
  byte step, epoch;
  byte sent; /* bit i, rank i: the words of this step are written there; the order is free */
  bool row;
  do
  /* A block starts when it likes and reads the base. If the ticket comes next, its threads are told apart: a first
     one reads the base, the others read it too and meet the first. Elsewhere barriers lie between. */
  :: d_step { step == IDLE && is_running[AT(me, block)] ->
       epoch = (FAULT == 1 -> value[me] : (epoch_base[me] + delta[me]) % WRAP);
       if
       :: halves[me] & DISPATCH_SEND -> step = (block == 0 -> COUNTS : (HAS_TOKEN -> ROW : DISPATCH_FLAGS))
       :: halves[me] == DISPATCH_RECV -> step = DISPATCH_WAIT
       :: halves[me] & COMBINE_SEND -> step = (!is_in_place[me] && block < NUM_ROWS(me) -> COPY : COMBINE_FLAGS)
       :: halves[me] == COMBINE_RECV -> step = (FAULT == 8 -> DRAW_TICKET : JOIN)
       fi }
  :: d_step { step == JOIN || step == LATE_JOIN ->
       assert(FAULT == 1 || (epoch_base[me] + delta[me]) % WRAP == epoch); /* one epoch for the launch */
       step = (step == JOIN -> DRAW_TICKET : COMBINE_WAIT_AND_PULL) }

  /* dispatch, send half */
  :: d_step { step == COUNTS && !(sent & 1) -> publish_counts(0); end_counts(1) }
  :: d_step { step == COUNTS && !(sent & 2) -> publish_counts(1); end_counts(2) }
  :: d_step { (step == ROW && FAULT != 5 || step == LATE_ROW) && (me == 0 || HAS_COUNT(1, 0, DST, epoch)) ->
       if
       :: me == 1 -> /* after the rows of lower ranks */
         ASSERT_NOT_LATER(EPOCH_OF(expert_counts[COUNT(1, 0, DST)]));
         row = VALUE_OF(expert_counts[COUNT(1, 0, DST)])
       :: else
       fi;
       route_row[AT(me, TOKEN)] = row;
       assert(recv_x[AT(DST, row)] == 0);
       recv_x[AT(DST, row)] = TAG(round[me], me, TOKEN);
       row = 0;
       if
       :: step == LATE_ROW -> end_dispatch_send()
       :: else -> step = DISPATCH_FLAGS
       fi }
  :: d_step { IS_AT_DISPATCH_FLAGS && !(sent & 1) ->
       publish_flag(dispatch_flags[FLAG(0, me, block)]); end_dispatch_flags(1) }
  :: d_step { IS_AT_DISPATCH_FLAGS && !(sent & 2) ->
       publish_flag(dispatch_flags[FLAG(1, me, block)]); end_dispatch_flags(2) }

  /* dispatch, receive half; the blocks share the flags, and the end of the launch joins them */
  :: d_step { step == DISPATCH_WAIT &&
       HAS_COUNT(me, 0, me, epoch) && IS_NOT_OLDER(dispatch_flags[FLAG(me, 0, block)], epoch) &&
       HAS_COUNT(me, 1, me, epoch) && IS_NOT_OLDER(dispatch_flags[FLAG(me, 1, block)], epoch) ->
       ASSERT_NOT_LATER(EPOCH_OF(expert_counts[COUNT(me, 0, me)]));
       ASSERT_NOT_LATER(EPOCH_OF(expert_counts[COUNT(me, 1, me)]));
       ASSERT_NOT_LATER(dispatch_flags[FLAG(me, 0, block)]);
       ASSERT_NOT_LATER(dispatch_flags[FLAG(me, 1, block)]);
       end_block() }

  /* combine, send half: row number block */
  :: d_step { step == COPY -> pass_row(me, block); step = COMBINE_FLAGS }
  :: d_step { step == COMBINE_FLAGS && !(sent & 1) ->
       combine_flags[FLAG(0, me, block)] = epoch; end_combine_flags(1) }
  :: d_step { step == COMBINE_FLAGS && !(sent & 2) ->
       combine_flags[FLAG(1, me, block)] = epoch; end_combine_flags(2) }

  /* combine, receive half; the last block to begin it moves the base */
  :: d_step { step == DRAW_TICKET ->
       ticket[me]++;
       if
       :: (FAULT == 4 -> block == 0 : ticket[me] == 2) -> epoch_base[me] = epoch
       :: else
       fi;
       if
       :: ticket[me] == 2 -> ticket[me] = 0
       :: else
       fi;
       step = (FAULT == 8 && halves[me] == COMBINE_RECV -> LATE_JOIN : COMBINE_WAIT_AND_PULL) }
  /* every block waits for all flags, then pulls token number block */
  :: d_step { step == COMBINE_WAIT_AND_PULL &&
       (FAULT == 3 && NUM_TO(me, 0) == 0 || HAS_FLAGS(combine_flags, me, 0, epoch)) &&
       (FAULT == 3 && NUM_TO(me, 1) == 0 || HAS_FLAGS(combine_flags, me, 1, epoch)) ->
       ASSERT_NOT_LATER(combine_flags[FLAG(me, 0, 0)]);
       ASSERT_NOT_LATER(combine_flags[FLAG(me, 0, 1)]);
       ASSERT_NOT_LATER(combine_flags[FLAG(me, 1, 0)]);
       ASSERT_NOT_LATER(combine_flags[FLAG(me, 1, 1)]);
       if
       :: block < num_tokens[me] ->
         row = route_row[AT(me, block)];
         assert(expert_output[AT(expert_of[AT(me, block)], row)] == TAG(round[me], me, block));
         expert_output[AT(expert_of[AT(me, block)], row)] = 0;
         row = 0
       :: else
       fi;
       end_block() }

  :: step == IDLE && round[me] > ROUNDS -> break
  od
}

inline launch(which) {
  halves[me] = which;
  is_running[AT(me, 0)] = 1;
  is_running[AT(me, 1)] = 1
}

inline choose_round() {
  if
  :: num_tokens[me] = 0
  :: num_tokens[me] = 1; expert_of[AT(me, 0)] = 0
  :: num_tokens[me] = 1; expert_of[AT(me, 0)] = 1
  :: num_tokens[me] = 2; expert_of[AT(me, 0)] = 0; expert_of[AT(me, 1)] = 1
  fi;
  if :: is_split = 0 :: is_split = 1 fi;
  if :: is_in_place[me] = 0 :: is_in_place[me] = 1 fi;
  if
  :: delta[me] = 1 /* eager: the host makes the Workload */
  :: skip          /* replay: the Workload of the capture again */
  fi;
  /* By value: round 1 is eager, the others replay what was captured after it. */
  value[me] = (FAULT == 1 -> (FIRST_EPOCH + (round[me] == 1 -> 1 : 2)) % WRAP : 0)
}

/* Clears what all readers are done with, so that rounds meet in few states. */
inline forget_round() {
  num_tokens[me] = 0;
  expert_of[AT(me, 0)] = 0;
  expert_of[AT(me, 1)] = 0;
  route_row[AT(me, 0)] = 0;
  route_row[AT(me, 1)] = 0;
  halves[me] = 0;
  is_in_place[me] = 0;
  is_split = 0;
  i = 0;
  do
  :: i < 4 -> /* a peer may have written the next round's already */
    if
    :: EPOCH_OF(expert_counts[me * 4 + i]) == epoch_base[me] -> expert_counts[me * 4 + i] = PACKET(epoch_base[me], 0)
    :: else
    fi;
    i++
  :: else -> i = 0; break
  od
}

/* Steps of a stream: the next thing to do when the last launch is done. */
#define BEGIN_ROUND 0
#define LAUNCH_DISPATCH_RECV 1
#define RUN_EXPERTS 2
#define LAUNCH_COMBINE_RECV 3
#define END_ROUND 4
#define IS_IDLE (!is_running[AT(me, 0)] && !is_running[AT(me, 1)])

proctype Stream(byte me) {
  byte step, i;
  bool is_split;
  do
  :: atomic { step == BEGIN_ROUND && round[me] <= ROUNDS ->
       choose_round();
       launch((is_split -> DISPATCH_SEND : DISPATCH_SEND | DISPATCH_RECV));
       step = (is_split -> LAUNCH_DISPATCH_RECV : RUN_EXPERTS) }
  :: d_step { step == LAUNCH_DISPATCH_RECV && IS_IDLE ->
       assert(FAULT != 6 || !is_in_place[me] || expert_output[AT(me, 0)] == 0 && expert_output[AT(me, 1)] == 0);
       launch(DISPATCH_RECV);
       step = RUN_EXPERTS }
  :: d_step { step == RUN_EXPERTS && IS_IDLE && is_in_place[me] && i < NUM_ROWS(me) -> pass_row(me, i); i++ }
  :: d_step { step == RUN_EXPERTS && IS_IDLE && !(is_in_place[me] && i < NUM_ROWS(me)) ->
       launch((is_split -> COMBINE_SEND : COMBINE_SEND | COMBINE_RECV));
       step = (is_split -> LAUNCH_COMBINE_RECV : END_ROUND) }
  :: d_step { step == LAUNCH_COMBINE_RECV && IS_IDLE -> launch(COMBINE_RECV); step = END_ROUND }
  :: d_step { step == END_ROUND && IS_IDLE ->
       assert(FAULT == 1 || epoch_base[me] == (FIRST_EPOCH + round[me]) % WRAP);
       forget_round();
       round[me]++;
       step = BEGIN_ROUND }
  :: step == BEGIN_ROUND && round[me] > ROUNDS -> break
  od
}

init {
  byte i;
  atomic {
    for (i : 0 .. 7) {
      dispatch_flags[i] = (FAULT == 7 -> 0 : FIRST_EPOCH);
      combine_flags[i] = (FAULT == 7 -> 0 : FIRST_EPOCH);
      expert_counts[i] = (FAULT == 7 -> 0 : PACKET(FIRST_EPOCH, 0))
    }
    for (i : 0 .. 1) {
      epoch_base[i] = FIRST_EPOCH;
      delta[i] = 1;
      round[i] = 1;
      run Stream(i);
      run Block(i, 0);
      run Block(i, 1)
    }
    i = 0
  }
}
