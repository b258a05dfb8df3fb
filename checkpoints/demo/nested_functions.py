"""Common functions on dicts, lists of lists and lists of words, in the format of `checkpoints.demo.singles`."""

BLOCKS = """
sort_by_length sort_words_by_length order_by_length|words
=the words sorted by length
-return sorted($a, key=len)

sort_words sort_strings alphabetical sort_alphabetically|words
=the words in alphabetical order
-return sorted($a)

zip_lists pair_up make_pairs pairs_of|items items
=a list of pairs of the elements of $a and $b
-return list(zip($a, $b))

adjacent_pairs neighbours consecutive_pairs|items
=a list of pairs of neighbours in $a
-return list(zip($a, $a[1:]))

all_pairs cartesian_product combinations_of|items items
=all pairs of an element of $a and one of $b
-return [($x, $y) for $x in $a for $y in $b]

flatten flatten_list flat flatten_lists concatenate_all flattened|lists
=the elements of all lists in $a
!flatten a list of lists
-return [$y for $x in $a for $y in $x]
-$r = []
for $x in $a:
    $r.extend($x)
return $r

list_lengths lengths_of_lists sublist_lengths|lists
=a list of the lengths of the lists in $a
-return [len($x) for $x in $a]

sum_of_lists sums_of_lists row_sums sum_rows|lists
=a list of the sums of the lists in $a
-return [sum($x) for $x in $a]

total_length count_all_elements total_elements|lists
=the number of elements in all lists of $a
-return sum(len($x) for $x in $a)

sum_nested sum_matrix total_of_lists sum_of_matrix|lists
=the sum of the numbers in all lists of $a
-return sum(sum($x) for $x in $a)

longest_list find_longest_list|matrix
=the longest list in $a
-return max($a, key=len)

non_empty_lists remove_empty drop_empty|lists
=the lists in $a that are not empty
-return [$x for $x in $a if $x]

transpose transpose_matrix rows_to_columns|matrix
=$a with rows and columns exchanged
!transpose a matrix
-return [list($x) for $x in zip(*$a)]

first_column get_first_column|matrix
=the first element of each row of $a
-return [$x[0] for $x in $a]

max_of_rows row_maximums row_max|matrix
=a list of the largest number of each row of $a
-return [max($x) for $x in $a]

diagonal main_diagonal get_diagonal|matrix
=the diagonal of $a
-return [$x[$i] for $i, $x in enumerate($a) if $i < len($x)]

identity_matrix unit_matrix|small:n,size,k
=the identity matrix of size $a
-return [[1 if $i == $j else 0 for $j in range($a)] for $i in range($a)]

zeros zero_matrix make_matrix|small:rows,n,height small:columns,m,width
=a matrix of zeros with $a rows and $b columns
-return [[0] * $b for _ in range($a)]

join_words join to_sentence words_to_text|words
=the words with spaces between them
!join the words with spaces
-return " ".join($a)

join_commas comma_list comma_join|words
=the words with commas between them
-return ", ".join($a)

word_lengths lengths get_lengths string_lengths|words
=a list of the lengths of the words
-return [len($x) for $x in $a]

longest_string longest find_longest get_longest|some_words
=the longest of the words
-return max($a, key=len)

shortest_string shortest find_shortest get_shortest|some_words
=the shortest of the words
-return min($a, key=len)

upper_all uppercase_all to_upper_all all_upper|words
=the words in upper case
-return [$x.upper() for $x in $a]

group_by_length by_length words_by_length|words
=a dict from length to the words of that length
-$r = {}
for $x in $a:
    $r.setdefault(len($x), []).append($x)
return $r

group_by_first_letter by_first_letter|words
=a dict from first letter to the words that begin with it
-$r = {}
for $x in $a:
    $r.setdefault($x[0], []).append($x)
return $r

length_dict lengths_by_word word_to_length|words
=a dict from each word to its length
-return {$x: len($x) for $x in $a}

merge_dicts merge combine_dicts merge_two_dicts update_dict|mapping mapping
=the entries of $a and $b, those of $b first in doubt
!merge two dictionaries
-return {**$a, **$b}
-$r = dict($a)
$r.update($b)
return $r

get_keys keys dict_keys list_keys key_list|mapping
=a list of the keys of $a
-return list($a.keys())
-return list($a)

get_values values dict_values list_values|mapping
=a list of the values of $a
-return list($a.values())

get_items dict_items list_entries to_pairs|mapping
=a list of the pairs of key and value in $a
-return list($a.items())

invert_dict invert swap_keys_and_values reverse_dict invert_mapping|mapping
=a dict from the values of $a to its keys
!swap the keys and values of $a
-return {$v: $x for $x, $v in $a.items()}

sum_values sum_of_values total_values add_values sum_dict|mapping
=the sum of the values of $a
-return sum($a.values())

max_value max_of_values largest_value|mapping
=the largest value of $a
-return max($a.values())

average_value mean_of_values average_of_values|mapping
=the average of the values of $a
-return sum($a.values()) / len($a)

key_with_max max_key best key_of_max_value highest|mapping
=the key with the largest value in $a
-return max($a, key=$a.get)

key_with_min min_key worst key_of_min_value lowest|mapping
=the key with the smallest value in $a
-return min($a, key=$a.get)

has_key contains_key key_exists is_key|mapping key
?$b is a key of $a
-return $b in $a

has_value contains_value value_exists|mapping number:value,v,x
?$b is a value of $a
-return $b in $a.values()

get_or_default get_value lookup get_or_zero|mapping key
=the value of $b in $a, or 0
-return $a.get($b, 0)

get_or_none find_value safe_get|mapping key
=the value of $b in $a, or None
-return $a.get($b)

get_with_default lookup_or value_or|mapping key number:default,fallback,other
=the value of $b in $a, or $c
-return $a.get($b, $c)

remove_key delete_key without_key drop_key|mapping key
=$a without the key $b
-return {$x: $v for $x, $v in $a.items() if $x != $b}

set_key add_entry with_entry set_value|mapping key number:value,v,new_value
=$a with $c for the key $b
-return {**$a, $b: $c}

dict_size count_keys number_of_keys|mapping
=the number of entries of $a
-return len($a)

sort_by_value sort_dict_by_value sorted_by_value|mapping
=$a sorted by value
-return dict(sorted($a.items(), key=lambda pair: pair[1]))

sort_by_key sort_dict sorted_keys_dict|mapping
=$a sorted by key
-return dict(sorted($a.items()))

sorted_keys keys_sorted get_sorted_keys|mapping
=the keys of $a, sorted
-return sorted($a)

keys_with_value find_keys keys_for|mapping number:value,v,target
=a list of the keys of $a whose value is $b
-return [$x for $x, $v in $a.items() if $v == $b]

filter_by_value values_above filter_dict|mapping number:limit,threshold,minimum,k
=the entries of $a whose value is greater than $b
-return {$x: $v for $x, $v in $a.items() if $v > $b}

keys_above keys_greater_than|mapping number:limit,threshold,minimum,k
=a list of the keys of $a whose value is greater than $b
-return [$x for $x, $v in $a.items() if $v > $b]

positive_entries filter_positive_values|mapping
=the entries of $a with positive values
-return {$x: $v for $x, $v in $a.items() if $v > 0}

double_values scale_values_by_two|mapping
=$a with its values doubled
-return {$x: $v * 2 for $x, $v in $a.items()}

increment_values add_one_to_values|mapping
=$a with its values increased by one
-return {$x: $v + 1 for $x, $v in $a.items()}

uppercase_keys upper_keys keys_to_upper|mapping
=$a with its keys in upper case
-return {$x.upper(): $v for $x, $v in $a.items()}

to_dict pairs_to_dict make_dict_from_pairs from_pairs|pairs
=a dict of the pairs
-return dict($a)

lists_to_dict zip_to_dict make_dict dict_from_lists|words:keys,names,ks numbers:values,numbers,vs
=a dict from the keys to the values
-return dict(zip($a, $b))

dict_of_squares squares_dict square_map|small:n,limit,k
=a dict from the numbers 1 to $a to their squares
-return {$i: $i * $i for $i in range(1, $a + 1)}

first_items_of_pairs get_firsts first_of_pairs|pairs
=a list of the first items of the pairs
-return [pair[0] for pair in $a]

second_items_of_pairs get_seconds second_of_pairs|pairs
=a list of the second items of the pairs
-return [pair[1] for pair in $a]

add_dicts sum_dicts combine_counts|mapping mapping
=the entries of $a and $b with the values of common keys added
-$r = dict($a)
for $x, $v in $b.items():
    $r[$x] = $r.get($x, 0) + $v
return $r

common_keys shared_keys keys_in_both|mapping mapping
=the set of keys that $a and $b have in common
-return set($a) & set($b)
"""
