"""Common functions on one list, in the format of `checkpoints.demo.singles`."""

BLOCKS = """
sum_list total sum_numbers sum_of_list list_sum sum_all add_all sum_of_numbers|numbers
=the sum of the numbers
=the sum of $a
!add up the numbers in $a
-return sum($a)
-$t = 0
for $x in $a:
    $t += $x
return $t

sum_list_recursive recursive_sum|numbers
=the sum of $a, by recursion
-if not $a:
    return 0
return $a[0] + $f($a[1:])

product multiply_all product_of_list list_product multiply_list|numbers
=the product of the numbers
=the product of $a
!multiply the numbers in $a
-$r = 1
for $x in $a:
    $r *= $x
return $r

average mean avg average_of_list mean_value get_average|some_numbers
=the average of the numbers
=the mean of $a
-return sum($a) / len($a)

safe_average average_or_zero|numbers
=the average of $a, or 0 if it is empty
-return sum($a) / len($a) if $a else 0

median find_median middle_value|some_numbers
=the median of $a
-$r = sorted($a)
$n = len($r)
if $n % 2 == 1:
    return $r[$n // 2]
return ($r[$n // 2 - 1] + $r[$n // 2]) / 2

find_max maximum max_value largest get_max biggest list_max find_largest find_maximum|some_numbers
=the largest of the numbers
=the maximum of $a
!find the largest number in $a
-return max($a)
-$r = $a[0]
for $x in $a:
    if $x > $r:
        $r = $x
return $r

find_min minimum min_value smallest get_min list_min find_smallest find_minimum|some_numbers
=the smallest of the numbers
=the minimum of $a
-return min($a)
-$r = $a[0]
for $x in $a:
    if $x < $r:
        $r = $x
return $r

min_and_max min_max extremes|some_numbers
=the smallest and the largest of $a
-return min($a), max($a)

range_of spread value_range difference_max_min|some_numbers
=the difference between the largest and the smallest of $a
-return max($a) - min($a)

second_largest second_max find_second_largest second_biggest|some_items
=the second largest of the different values in $a, or None
-$r = sorted(set($a))
return $r[-2] if len($r) > 1 else None

second_smallest second_min find_second_smallest|some_items
=the second smallest of the different values in $a, or None
-$r = sorted(set($a))
return $r[1] if len($r) > 1 else None

index_of_max argmax position_of_max|some_numbers
=the index of the largest number in $a
-return $a.index(max($a))

index_of_min argmin position_of_min|some_numbers
=the index of the smallest number in $a
-return $a.index(min($a))

sum_of_squares sum_squares squared_sum|numbers
=the sum of the squares of $a
-return sum($x * $x for $x in $a)

square_all squares square_list square_each squared_list square_numbers|numbers
=a list of the squares of $a
!square each number in $a
-return [$x * $x for $x in $a]
-return [$x ** 2 for $x in $a]

double_all doubles double_list double_each double_numbers|numbers
=a list of the numbers doubled
!double each number in $a
-return [$x * 2 for $x in $a]

filter_even even_numbers get_evens keep_even only_even evens get_even_numbers|numbers
=the even numbers in $a
!keep the even numbers
-return [$x for $x in $a if $x % 2 == 0]

filter_odd odd_numbers get_odds keep_odd only_odd odds get_odd_numbers|numbers
=the odd numbers in $a
!keep the odd numbers
-return [$x for $x in $a if $x % 2 == 1]

filter_positive positive_numbers keep_positive only_positive positives|numbers
=the positive numbers in $a
-return [$x for $x in $a if $x > 0]

filter_negative negative_numbers keep_negative negatives|numbers
=the negative numbers in $a
-return [$x for $x in $a if $x < 0]

count_even count_evens number_of_evens|numbers
=the number of even numbers in $a
-return sum(1 for $x in $a if $x % 2 == 0)

count_odd count_odds number_of_odds|numbers
=the number of odd numbers in $a
-return sum(1 for $x in $a if $x % 2 == 1)

running_total running_sum cumulative_sum prefix_sums accumulate|numbers
=the running totals of $a
=a list of the cumulative sums of $a
-$r = []
$t = 0
for $x in $a:
    $t += $x
    $r.append($t)
return $r

differences consecutive_differences deltas|numbers
=the differences between neighbours in $a
-return [$y - $x for $x, $y in zip($a, $a[1:])]

is_increasing strictly_increasing is_ascending|numbers
?every number in $a is larger than the one before
-return all($x < $y for $x, $y in zip($a, $a[1:]))

is_sorted check_sorted sorted_already is_ordered|numbers
?$a is sorted
-return $a == sorted($a)

scale scale_all multiply_each multiply_by|numbers number:factor,k,scale,by
=the numbers multiplied by $b
-return [$x * $b for $x in $a]

add_to_all add_to_each shift increase_all|numbers number:amount,k,offset,by
=the numbers increased by $b
-return [$x + $b for $x in $a]

dot_product dot inner_product scalar_product|numbers numbers
=the dot product of $a and $b
-return sum($x * $y for $x, $y in zip($a, $b))

add_lists add_elementwise add_vectors elementwise_sum|numbers numbers
=the sums of the elements of $a and $b
!add two lists element by element
-return [$x + $y for $x, $y in zip($a, $b)]

multiply_lists multiply_elementwise elementwise_product|numbers numbers
=the products of the elements of $a and $b
-return [$x * $y for $x, $y in zip($a, $b)]

subtract_lists subtract_elementwise elementwise_difference|numbers numbers
=the differences of the elements of $a and $b
-return [$x - $y for $x, $y in zip($a, $b)]

two_sum has_pair_with_sum pair_sum|numbers number:target,total,goal,k
?two different elements of $a add up to $b
-seen = set()
for $x in $a:
    if $b - $x in seen:
        return True
    seen.add($x)
return False

list_length length size count_items number_of_items count_elements|items
=the number of elements in $a
=the length of $a
-return len($a)

is_empty empty check_empty is_empty_list has_no_items|items
?$a is empty
-return len($a) == 0
-return not $a

is_not_empty has_items non_empty|items
?$a is not empty
-return len($a) > 0

first_element first get_first first_item head|some_items
=the first element of $a
-return $a[0]

last_element last get_last last_item final_element|some_items
=the last element of $a
-return $a[-1]

first_or_none first_or_default get_first_or_none|items
=the first element of $a, or None if it is empty
-return $a[0] if $a else None

last_or_none get_last_or_none|items
=the last element of $a, or None if it is empty
-return $a[-1] if $a else None

second_element second get_second second_item|some_items
=the second element of $a
-return $a[1]

middle_element middle get_middle|some_items
=the middle element of $a
-return $a[len($a) // 2]

get_item element_at get_element item_at nth_element|some_items small:index,i,n,position
=the element of $a at index $b, or None
-return $a[$b] if $b < len($a) else None

take first_n take_first first_elements|items small
=the first $b elements of $a
-return $a[:$b]

take_last last_n last_elements|items small
=the last $b elements of $a
-return $a[-$b:]

drop skip drop_first skip_first|items small
=$a without its first $b elements
-return $a[$b:]

tail rest all_but_first without_first_element|items
=$a without its first element
-return $a[1:]

all_but_last init without_last_element|items
=$a without its last element
-return $a[:-1]

every_other every_second alternate_elements|items
=every second element of $a
-return $a[::2]

every_nth take_every each_nth|items small:n,step,k
=every $b-th element of $a
-return $a[::$b]

reverse_list reverse reversed_list reverse_items list_reverse|items
=$a in reverse order
!reverse a list
-return $a[::-1]
-return list(reversed($a))

sort_list sort sorted_list sort_items sort_ascending|numbers
=$a sorted
!sort a list
-return sorted($a)

sort_descending sort_reverse sorted_descending sort_desc|numbers
=$a sorted from largest to smallest
!sort a list in descending order
-return sorted($a, reverse=True)

sort_by_absolute sort_by_abs|numbers
=$a sorted by absolute value
-return sorted($a, key=abs)

contains has includes is_in is_member in_list exists|items item
?$a contains $b
?$b is in $a
-return $b in $a

not_contains is_missing not_in lacks|items item
?$b is not in $a
-return $b not in $a

count_occurrences count count_value occurrences count_item how_many|items item
=the number of times $b occurs in $a
!count how often $b occurs in $a
-return $a.count($b)

index_of find_index find position get_index|items item
=the index of $b in $a, or -1 if it is not there
-return $a.index($b) if $b in $a else -1
-for $i, $x in enumerate($a):
    if $x == $b:
        return $i
return -1

linear_search search|items item
=the index of $b in $a, or -1, by looking at each element
-for $i, $x in enumerate($a):
    if $x == $b:
        return $i
return -1

remove_value remove_item remove_all without delete_value|items item
=$a without every $b
!remove every $b from $a
-return [$x for $x in $a if $x != $b]

replace_value replace_item replace_all|items item:old,a,before item:new,b,after
=$a with every $b replaced by $c
-return [$c if $x == $b else $x for $x in $a]

append add_item append_item push add_to_end|items item
=$a with $b added at the end
-return $a + [$b]

prepend add_first insert_first add_to_front|items item
=$a with $b added in front
-return [$b] + $a

insert_at insert insert_item|items small:index,i,position item
=$a with $c inserted at index $b
-return $a[:$b] + [$c] + $a[$b:]

remove_at delete_at remove_index|items small:index,i,position
=$a without the element at index $b
-return $a[:$b] + $a[$b + 1:]

concatenate_lists join_lists combine_lists merge_lists|items items
=the elements of $a followed by those of $b
!join two lists
-return $a + $b

repeat_list repeat_items|items small
=$a repeated $b times
-return $a * $b

repeat_value make_list filled fill_list|item:value,x,item small:count,n,length,size
=a list of $b times $a
-return [$a] * $b

swap_first_and_last swap_ends exchange_ends|some_items
=$a with its first and last elements swapped
-return [$a[-1], *$a[1:-1], $a[0]]

rotate rotate_left shift_left|items small:k,n,steps
=$a rotated to the left by $b
-return $a[$b:] + $a[:$b]

rotate_right shift_right|some_items
=$a rotated to the right by one
-return $a[-1:] + $a[:-1]

remove_duplicates unique distinct dedupe unique_elements deduplicate remove_repeats|items
=$a without duplicates
=the different elements of $a in order
!remove the duplicates from $a
-$r = []
for $x in $a:
    if $x not in $r:
        $r.append($x)
return $r
-return list(dict.fromkeys($a))

has_duplicates contains_duplicates any_duplicates|items
?$a has duplicates
?any element of $a occurs twice
-return len(set($a)) < len($a)

all_unique all_different are_unique all_distinct|items
?all elements of $a are different
-return len(set($a)) == len($a)

find_duplicates duplicates get_duplicates repeated|items
=the set of elements that occur more than once in $a
-return {$x for $x in $a if $a.count($x) > 1}

all_equal all_same are_all_equal are_equal_elements|items
?all elements of $a are equal
-return len(set($a)) <= 1

count_unique count_distinct number_of_unique unique_count|items
=the number of different elements in $a
-return len(set($a))
"""
